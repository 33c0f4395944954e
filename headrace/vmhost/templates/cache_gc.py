"""What the cache holds, what refers to it, and removing what nothing refers to.

References are names and use: a built-in template is referred to by this configuration, an imported image by its name
and by recipes on it, a recipe's template by its recipe, a base image by being what this version would make, and
anything by a host that has it open. The rest is of earlier versions, other slot counts, moved names, or of a process
that died; it can all be made again.
"""

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.config import Environment
from headrace.vmhost import image, imported, levels, packages, probe, qemu
from headrace.vmhost.errors import VmhostError

_TEMPLATE = re.compile(r"template-([a-z0-9][a-z0-9._-]*)-([0-9a-f]{16})")


class Held(msgspec.Struct, frozen=True):
    """One thing in the cache. `why` names the reference; empty when there is none."""

    path: str
    what: str
    mib: float
    why: str


def holdings(environment: Environment) -> list[Held]:
    """Everything in the cache, in order of path. VmhostError when the cache can't be read."""
    cache = Path(environment.cache_dir).resolve()  # names are links, and lead to where it really is
    if not cache.is_dir():
        return []
    base = packages.folder(cache)
    wanted = _wanted(environment, cache, base)
    roots = {str((cache / f"image-{name}").resolve()): name for name in imported.names(cache)}
    found = []
    for path in sorted(cache.iterdir()):
        template = _TEMPLATE.fullmatch(path.name)
        if path.is_symlink() or path.name in ("lock", "probe.json"):
            continue
        if template:
            why = "a host has it open" if image.in_use(path) else wanted.get(path.name, "")
            found.append(Held(str(path), f"template {template[1]}", _mib(path), why))
        elif path.name.startswith("root-"):
            name = roots.get(str(path), "")
            found.append(Held(str(path), f"image {name}".strip(), _mib(path), f"the name {name}" if name else ""))
        elif path.name.startswith("base-"):
            found.append(Held(str(path), "base image", _mib(path), "this version's packages" if path == base else ""))
        elif path.name.startswith("task-"):
            found.append(Held(str(path), f"recipe {path.name.removeprefix('task-')}", _mib(path), "its name"))
        elif path.name.startswith("making-"):
            found.append(Held(str(path), "left by a process that died", _mib(path), ""))
    return found


def collect(environment: Environment, forget: tuple[str, ...] = ()) -> list[Held]:
    """Drop the names in `forget`, then remove what nothing refers to; what went. VmhostError for an unknown name.

    Waits for whoever makes something in the cache: what is in the making is not there yet.
    """
    cache = Path(environment.cache_dir).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in forget:
            known = [cache / f"{kind}-{name}" for kind in ("image", "task")]
            if not imported.NAME.match(name) or not any(path.is_symlink() or path.exists() for path in known):
                raise VmhostError(f"there is no image or recipe {name!r} to forget")
            users = [other for other in levels.names(cache) if (levels.find(cache, other) or _none).base == name]
            if users:
                raise VmhostError(f"{name} is what {', '.join(users)} stands on: forget that first")
            for path in known:
                path.unlink(missing_ok=True)
        gone = []
        for held in holdings(environment):
            path = Path(held.path)
            if held.why:
                continue
            if held.what.startswith("template"):
                if image.remove(path):
                    gone.append(held)
                continue
            with suppress(FileNotFoundError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
            gone.append(held)
        return gone


_none = levels.Recipe(name="", base="")


def _wanted(environment: Environment, cache: Path, base: Path) -> dict[str, str]:
    """Names of template folders that this configuration would load, and who refers to them."""
    if not (base / "done").exists():
        return {}
    try:
        version = qemu.version()
        accel, machine, _ = probe.choose(base, cache, version, environment.accel)
    except VmhostError:
        return {path.name: "no QEMU here can tell" for path in cache.glob("template-*")}
    parts = image.Parts(cache, base, version, accel, machine, lambda text: None)
    return dict(_names(environment, cache, parts))


def _names(environment: Environment, cache: Path, parts: image.Parts) -> Iterator[tuple[str, str]]:
    for name in (*packages.FLAVOURS, *imported.names(cache), *levels.names(cache)):
        with suppress(VmhostError):
            plan = image.plan(environment, name)
            yield f"template-{name}-{plan.key(parts)}", f"the name {name}"


def _mib(path: Path) -> float:
    """Blocks that it takes on disk: memory images have holes."""
    files = path.rglob("*") if path.is_dir() else [path]
    return round(sum(file.lstat().st_blocks * 512 for file in files) / (1 << 20), 1)
