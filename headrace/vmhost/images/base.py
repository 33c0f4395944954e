"""Builds templates from the start: packages, probe, boot, freeze. Every part is cached by content and made once per
machine.

Any number of threads and processes may call `ensure` at once. Each template is made by one of them, and the others that
want it wait for its lock file and then load; different templates are made at the same time. The lock of the whole cache
is shared by all who make templates; a caller that changes the store of images, or removes files, holds it alone.
"""

import asyncio
import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from headrace.config import Environment
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, packages, store
from headrace.vmhost.node import capacity
from headrace.vmhost.qemu import probe, process
from headrace.vmhost.qemu.process import Hardware
from headrace.vmhost.templates import classes, template
from headrace.vmhost.templates.template import Template, UnusableTemplate
from headrace.vmhost.templates.validation import verify

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

    `say` gets one line for each step that takes long.
    """
    cache = Path(environment.cache_dir).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "lock").open("w")
    except OSError as error:
        raise VmhostError(f"the cache folder {cache} can't be used: {error.strerror}") from None
    with lock:
        try:
            _clean(cache, lock)
            version = process.version()
            base = packages.folder(cache)
            made = (base / "done").exists()
            if not made or probe.remembered(base, cache, version, environment.accel) is None:
                fcntl.flock(lock, fcntl.LOCK_EX)
                base = packages.base(cache, say)
            accel, machine, _ = probe.choose(base, cache, version, environment.accel)
            fcntl.flock(lock, fcntl.LOCK_SH)
            parts = Parts(cache, base, version, accel, machine, say)
            return {name: _classed(plan(environment, name), parts) for name in templates}
        except OSError as error:
            raise VmhostError(f"the guest image can't be made in {cache}: {error}") from None


def _clean(cache: Path, lock: IO[str]) -> None:
    """Remove what processes left that died, unless another one uses the cache: what it makes looks the same."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for left in cache.glob("making-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def maker(cache: Path, folder: str) -> Iterator[None]:
    """Be the only one that makes or loads the template of this folder."""
    (cache / "locks").mkdir(exist_ok=True)
    with (cache / "locks" / folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Parts(NamedTuple):
    """The parts that every template of this machine shares."""

    cache: Path
    base: Path
    version: str
    accel: process.Accel
    machine: process.MachineType
    say: Callable[[str], None]


class TemplatePlan(NamedTuple):
    """The meaning of a template's name: a built-in image, or an imported one."""

    name: str
    memory_mb: int
    slots: int
    image: imported.Image | None = None
    drives: int = 0
    disk: bool = False
    limits: SandboxLimits = SandboxLimits()
    """The class of its machines."""

    def hardware(self, accel: process.Accel, machine: process.MachineType) -> Hardware:
        """Its machine."""
        ports = 1 + self.slots
        return Hardware(
            accel=accel,
            machine=machine,
            memory_mb=self.memory_mb,
            ports=ports,
            drives=self.drives,
            vcpus=max(1, self.limits.vcpus),
            disk=self.disk,
        )

    @property
    def machine(self) -> "TemplatePlan":
        """The template from which an image's clones are made: one for all images whose machines have equal memory,
        equally many processors, and a disk or none."""
        vcpus = self.limits.vcpus
        disk = capacity.on_disk(self.memory_mb, self.limits)
        name = f"{template.MACHINE}-{self.memory_mb}" + (f"-{vcpus}cpu" if vcpus > 1 else "") + "-disk" * disk
        return TemplatePlan(
            name, self.memory_mb, 1, drives=store.DRIVES + 1, disk=disk, limits=SandboxLimits(vcpus=vcpus)
        )

    @property
    def disk_mib(self) -> int:
        """Size of the disk of each of its machines; 0: they have none."""
        return self.limits.disk_mib if self.image is not None and self.machine.disk else 0

    def folder(self, parts: "Parts") -> str:
        """Name of its template's folder in the cache."""
        if self.image is not None:
            return self.machine.folder(parts)
        return f"template-{self.name}-{self.key(parts)}"

    def key(self, parts: Parts) -> str:
        """Its content address here."""
        if self.image is not None:
            return template.key_with(self.machine.key(parts), self.image, self.limits.disk_mib)
        hardware = self.hardware(parts.accel, parts.machine)
        return template.key(self.name, parts.base, parts.version, hardware, self.slots)


def plan(environment: Environment, name: str) -> TemplatePlan:
    """The plan for a template of this name, which may carry a class (templates/classes.py). VmhostError when the name
    is unknown, or no such machine can be made."""
    name, limits = classes.split(name)
    cache = Path(environment.cache_dir).absolute()
    if not 1 <= environment.slots_per_vm <= packages.SLOTS_MAX:
        raise VmhostError(f"slots_per_vm must be 1 to {packages.SLOTS_MAX}, not {environment.slots_per_vm}")
    if name in packages.FLAVOURS:
        memory = environment.memory_mb if name == "light" else max(environment.memory_mb, DEBIAN_MB)
        if limits.disk_mib:
            raise VmhostError(f"the files of template {name} have a limit of their own: disk_mib is for images")
        if limits.memory_mib and name == "debian" and limits.memory_mib < DEBIAN_MB:
            raise VmhostError(f"template {name} needs at least {DEBIAN_MB} MiB, and memory_mib is {limits.memory_mib}")
        return TemplatePlan(name, limits.memory_mib or memory, environment.slots_per_vm, limits=limits)
    image = imported.find(cache, name)
    if image is not None:
        memory = limits.memory_mib or max(environment.memory_mb, image.memory_mb)
        return TemplatePlan(name, memory, 1, image, limits=limits)
    names = [*packages.FLAVOURS, *imported.names(cache)]
    raise VmhostError(
        f"there is no template {name!r}; known are {', '.join(names)}: a container image is stored by `headrace images`"
    )


def _classed(wanted: TemplatePlan, parts: Parts) -> Template:
    return msgspec.structs.replace(_one(wanted, parts), limits=wanted.limits)


def _one(wanted: TemplatePlan, parts: Parts) -> Template:
    cache = parts.cache
    if wanted.image is not None:
        wanted.image.segments()
        return msgspec.structs.replace(_one(wanted.machine, parts), image=wanted.image, limits=wanted.limits)
    with maker(cache, wanted.folder(parts)):
        return _load_or_make(wanted, parts)


def _load_or_make(wanted: TemplatePlan, parts: Parts) -> Template:
    cache, say = parts.cache, parts.say
    key = wanted.key(parts)
    folder = cache / wanted.folder(parts)
    if folder.exists():
        try:
            return template.load(folder, key)
        except UnusableTemplate as refused:
            say(f"template {wanted.name}: refused, made again: {refused}")
    how = f"({parts.accel}, {parts.machine}; under a minute)"
    say(f"template {wanted.name}: booting once, opening {wanted.slots} slots, freezing {how}")
    hardware = wanted.hardware(parts.accel, parts.machine)
    work = template.build(wanted.name, parts.base, hardware, wanted.slots, folder, parts.version)
    with asyncio.Runner() as runner:
        made = runner.run(work)
        try:
            runner.run(verify(made))
        except VmhostError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    _forget_old(cache, wanted.name)
    return made


def _forget_old(cache: Path, name: str) -> None:
    """Remove all but the newest templates of a name, unless a host still has one open."""
    folders = [path for path in cache.glob(f"template-{name}-*") if path.name[len(f"template-{name}-") :].isalnum()]
    folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders[KEPT:]:
        remove(folder)


def remove(folder: Path) -> bool:
    """Remove a template that no host has open; whether it is gone."""
    try:
        with (folder / "manifest.json").open() as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    return True


def in_use(folder: Path) -> bool:
    """Whether a host has the template open."""
    try:
        with (folder / "manifest.json").open() as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
