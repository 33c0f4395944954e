"""Lists the entries of the cache with their references, and removes entries without one.

An entry is referenced by a name or by use: a built-in template by this configuration, an imported image by its name, a
base image if this version would build the same one, and
any entry by a host that has it open. Other entries come from earlier versions, other slot counts, changed names, or a
process that was killed; all of them can be built again.
"""

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.config import Environment
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base as image
from headrace.vmhost.images import building, imported, packages, store
from headrace.vmhost.qemu import probe, process

_TEMPLATE = re.compile(r"template-([a-z0-9][a-z0-9._-]*)-([0-9a-f]{16})")


class CacheEntry(msgspec.Struct, frozen=True):
    """One entry of the cache. `why` names its reference; empty if there is none."""

    path: str
    what: str
    mib: float
    why: str


def holdings(environment: Environment) -> list[CacheEntry]:
    """All entries of the cache, sorted by path. VmhostError when the cache cannot be read."""
    cache = Path(environment.cache_dir).resolve()  # names are links to real paths
    if not cache.is_dir():
        return []
    base = packages.folder(cache)
    wanted = _wanted(environment, cache, base)
    roots = {str((cache / f"image-{name}").resolve()): name for name in imported.names(cache)}
    layers: dict[str, list[str]] = {}
    for imported_image in imported.images(cache):
        for part in store.segments(cache, imported_image.boundaries) or ():
            layers.setdefault(part.folder, []).append(imported_image.name)
    entries = []
    for path in sorted(cache.iterdir()):
        template = _TEMPLATE.fullmatch(path.name)
        if path.is_symlink() or path.name in ("lock", "locks", "probe.json"):
            continue
        if template:
            why = "a host has it open" if image.in_use(path) else wanted.get(path.name, "")
            entries.append(CacheEntry(str(path), f"template {template[1]}", _mib(path), why))
        elif path.name.startswith("root-"):
            name = roots.get(str(path), "")
            entries.append(
                CacheEntry(str(path), f"image {name}".strip(), _mib(path), f"the name {name}" if name else "")
            )
        elif path.name.startswith("layers-"):
            users = ", ".join(sorted(layers.get(str(path), ())))
            entries.append(CacheEntry(str(path), "layers of images", _mib(path), users and f"the images {users}"))
        elif path.name == "downloads":
            entries.append(CacheEntry(str(path), "downloads that were cut", _mib(path), ""))
        elif path.name == "buildah" and building.layers(cache):
            why = "" if building.forget(cache, dry=True) else "a build uses them"
            entries.append(CacheEntry(str(path), "layers of Dockerfiles", _mib(path), why))
        elif path.name.startswith("base-"):
            entries.append(
                CacheEntry(str(path), "base image", _mib(path), "this version's packages" if path == base else "")
            )
        elif path.name.startswith("making-"):
            entries.append(CacheEntry(str(path), "left by a process that died", _mib(path), ""))
    return entries


def collect(environment: Environment, forget: tuple[str, ...] = ()) -> list[CacheEntry]:
    """Drop the names in `forget`, then remove entries without a reference; the removed ones. VmhostError for an unknown
    name. It waits for a build that is under way in the cache, because its result has no reference yet.
    """
    cache = Path(environment.cache_dir).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in forget:
            path = cache / f"image-{name}"
            if not imported.NAME.match(name) or not (path.is_symlink() or path.exists()):
                raise VmhostError(f"there is no image {name!r}")
            path.unlink()
        removed = []
        for entry in holdings(environment):
            path = Path(entry.path)
            if entry.why:
                continue
            if entry.what.startswith("template"):
                if image.remove(path):
                    removed.append(entry)
                continue
            if path.name == "buildah":
                if building.forget(cache):
                    removed.append(entry)
                continue
            with suppress(FileNotFoundError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
            removed.append(entry)
        return removed


def _wanted(environment: Environment, cache: Path, base: Path) -> dict[str, str]:
    """Names of the template folders that this configuration would load, and their references."""
    if not (base / "done").exists():
        return {}
    try:
        version = process.version()
        accel, machine, _ = probe.choose(base, cache, version, environment.accel)
    except VmhostError:
        return {path.name: "no QEMU here can tell" for path in cache.glob("template-*")}
    parts = image.Parts(cache, base, version, accel, machine, lambda text: None)
    return dict(_names(environment, cache, parts))


def _names(environment: Environment, cache: Path, parts: image.Parts) -> Iterator[tuple[str, str]]:
    for name in (*packages.FLAVOURS, *imported.names(cache)):
        with suppress(VmhostError):
            plan = image.plan(environment, name)
            yield plan.folder(parts), f"the name {name}"


def _mib(path: Path) -> float:
    """MiB on disk, by blocks: memory images are sparse."""
    files = path.rglob("*") if path.is_dir() else [path]
    return round(sum(file.lstat().st_blocks * 512 for file in files) / (1 << 20), 1)
