"""From nothing to templates: packages, probe, boot, freeze. Everything is cached by content and made once per machine.

`ensure` may be called by any number of processes at once: one makes, the others wait on a lock file and then load.
"""

import asyncio
import fcntl
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.config import Environment
from headrace.vmhost import packages, probe, qemu, template
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.qemu import Hardware
from headrace.vmhost.template import Refused, Template

DEBIAN_MB = 768
"""Memory of the full image: its root alone takes 100 MB."""

KEPT = 4
"""Templates of one name that stay in the cache: of other slot counts, QEMU versions, agents."""


def _silent(text: str) -> None:
    pass


def ensure(
    environment: Environment, say: Callable[[str], None] = _silent, templates: Sequence[str] = ("light",)
) -> dict[str, Template]:
    """The templates by name, made where they are missing, damaged or of other parts. Blocks; VmhostError.

    `say` hears one line per thing that takes long.
    """
    cache = Path(environment.cache_dir).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "lock").open("w")
    except OSError as error:
        raise VmhostError(f"the cache folder {cache} can't be used: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for left in cache.glob("making-*"):  # of a process that died: whoever makes something holds the lock
                shutil.rmtree(left, ignore_errors=True)
            version = qemu.version()
            base = packages.base(cache, say)
            accel, machine, _ = probe.choose(base, cache, version, environment.accel)
            return {name: _one(name, environment, cache, base, version, accel, machine, say) for name in templates}
        except OSError as error:
            raise VmhostError(f"the guest image can't be made in {cache}: {error}") from None


def _one(
    name: str,
    environment: Environment,
    cache: Path,
    base: Path,
    version: str,
    accel: qemu.Accel,
    machine: qemu.MachineType,
    say: Callable[[str], None],
) -> Template:
    if name not in packages.FLAVOURS:
        raise VmhostError(f"there is no template {name!r}; known are {', '.join(packages.FLAVOURS)}")
    if not 1 <= environment.slots_per_vm <= packages.SLOTS_MAX:
        raise VmhostError(f"slots_per_vm must be 1 to {packages.SLOTS_MAX}, not {environment.slots_per_vm}")
    memory = environment.memory_mb if name == "light" else max(environment.memory_mb, DEBIAN_MB)
    slots = environment.slots_per_vm
    hardware = Hardware(accel=accel, machine=machine, memory_mb=memory, ports=1 + slots)
    wanted = template.key(name, base, version, hardware, slots)
    folder = cache / f"template-{name}-{wanted}"
    if folder.exists():
        try:
            return template.load(folder, wanted)
        except Refused as refused:
            say(f"template {name}: refused, made again: {refused}")
    say(f"template {name}: booting once, opening {slots} slots, freezing ({accel}, {machine}; under a minute)")
    with asyncio.Runner() as runner:
        made = runner.run(template.build(name, base, hardware, slots, folder, version))
    _forget_old(cache, name)
    return made


def _forget_old(cache: Path, name: str) -> None:
    """Remove all but the newest templates of a name, unless a host still has one open."""
    folders = sorted(cache.glob(f"template-{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders[KEPT:]:
        with suppress(OSError), (folder / "manifest.json").open() as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
