"""A template: a machine that is booted once, with its slots open and exercised, and frozen into files for its clones.

``ram`` is the guest's memory, mapped privately by every clone; ``state`` is the rest of the machine (64 KiB on a
microVM); ``fixed`` lists the pages of the memory that no clone may write (see qemu/integrity.py). They are immutable,
and their folder's name is a hash of everything that they are made from: kernel, root, agent, QEMU, hardware. The
manifest holds that list and hashes of the files; a template that does not match is refused and built again.
"""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash
from qemu.qmp import QMPClient

from headrace.errors import HeadraceError
from headrace.messages.sandbox import PullTree, ReadFile, ReplaceLines, RunTests, SandboxLost, Search
from headrace.messages.tasks import SandboxLimits, TestPlan
from headrace.vmhost import agent_files, protocol
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import cpio, packages, store
from headrace.vmhost.images.imported import Image
from headrace.vmhost.qemu import integrity, process
from headrace.vmhost.qemu.drives import open_drives
from headrace.vmhost.qemu.integrity import IntegrityCheck
from headrace.vmhost.qemu.integrity import load as load_integrity
from headrace.vmhost.qemu.memory import Memory, descriptor, sealed
from headrace.vmhost.qemu.process import Hardware, Qemu
from headrace.vmhost.templates import classes

FORMAT = 4
FILES = ("ram", "state", "fixed")
MODULES = (*packages.MODULES, packages.CONSOLE)
MACHINE = "machine"
"""First word of the templates for images, which have drives: one for each size of memory."""
BOOT_S = {"kvm": 30.0, "tcg": 180.0}
"""Deadline of a template's boot and warm-up; 5 and 15 s on a quiet machine."""
SIZE_MB = {"light": 16, "debian": 192}
"""Capacity of a slot's workspace, and of its /tmp."""
IMAGE_MB = 64
"""Largest push into a sandbox of an imported image, and capacity of its /dev/shm. Files use memory."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a template, and the hashes of its files."""

    format: int
    name: str
    key: str
    qemu: str
    hardware: Hardware
    kernel: str
    tsc_khz: int
    slots: int
    has_pytest: bool
    ram_bytes: int
    ram_hash: str
    state_hash: str
    fixed_hash: str
    built_s: float
    facts: dict[str, Any]
    push_mb: int = 0
    """The largest frame that a slot accepts, in MiB; 0: as the flavour says."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A template on disk."""

    folder: Path
    manifest: Manifest
    stamp: tuple[int, ...] = ()
    """State of the files when their hashes were checked."""
    image: Image | None = None
    """The image of its clones."""
    limits: SandboxLimits = SandboxLimits()
    """The class of its machines."""

    @property
    def intact(self) -> bool:
        """Whether the files are unchanged, by inode, size and times; of an image, whether the store still has them."""
        image = self.image
        stored = image is None or store.segments(Path(image.folder).parent, image.boundaries) is not None
        return self.stamp == _stamp(self.folder) and stored

    @property
    def name(self) -> str:
        """The name by which a node finds it; a template of an image is named by the image's digest."""
        name = self.image.digest if self.image is not None else self.manifest.name
        return classes.named(name, self.limits)

    @property
    def key(self) -> str:
        """The content address of what its clones begin as."""
        if self.image is None:
            return self.manifest.key
        return key_with(self.manifest.key, self.image, self.limits.disk_mib)

    @property
    def disk_mib(self) -> int:
        """Size of the disk of each of its machines; 0: they have none."""
        return self.limits.disk_mib if self.manifest.hardware.disk else 0

    @property
    def ram(self) -> Path:
        """The memory image."""
        return self.folder / "ram"

    @property
    def memory(self) -> Memory:
        """The memory image as clones map it; read on first use. VmhostError."""
        return sealed(self.ram, self.stamp, self.manifest.name)

    @property
    def state(self) -> Path:
        """The device state."""
        return self.folder / "state"

    @property
    def integrity(self) -> IntegrityCheck:
        """The check of machines against its fixed pages. VmhostError."""
        return load_integrity(self.folder / "fixed", self.stamp)

    @property
    def push_mb(self) -> int:
        """The largest frame that a slot accepts, in MiB."""
        return self.manifest.push_mb or SIZE_MB.get(self.manifest.name, IMAGE_MB)


class UnusableTemplate(HeadraceError):
    """A template on disk cannot be used; it is built again."""


def agent_archive() -> bytes:
    """The agent as an initramfs archive, which is appended to the root's."""
    import io

    entries = [cpio.folder("opt"), cpio.folder("opt/headrace"), cpio.folder("opt/headrace/guest")]
    entries += [cpio.folder(f"opt/headrace/guest/{name}") for name in agent_files.folders()]
    for name, source in agent_files.sources().items():
        if name != "local.py":
            entries.append(cpio.file(f"opt/headrace/guest/{name}", source))
    boot = b"import sys\nsys.path.insert(0, '/opt/headrace')\nfrom guest.boot import init\ninit.main()\n"
    entries.append(cpio.file("opt/headrace/boot.py", boot))
    entries.append(cpio.file("init", b"#!/usr/bin/python3 -IB\n" + boot, 0o755))
    entries.append(cpio.device("dev/console", 5, 1, 0o600))
    out = io.BytesIO()
    cpio.write(out, entries)
    return out.getvalue()


def modules(hardware: Hardware) -> tuple[str, ...]:
    """The kernel modules of a machine, in the order in which they are loaded."""
    return (*MODULES, *(packages.DRIVES if hardware.drives else (packages.OVERLAY,)))


def key_with(machine: str, image: Image, disk_mib: int = 0) -> str:
    """The content address of an image's clones: of the template's key, of what its drives hold, and of the limit of its
    writable layer."""
    parts = [machine, image.digest, image.boundaries, *([disk_mib] if disk_mib else ())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def key(name: str, base: Path, version: str, hardware: Hardware, slots: int) -> str:
    """The content address of a template: a hash of everything that it is made from."""
    root = MACHINE if hardware.drives else name
    shape = msgspec.to_builtins(hardware)
    if shape["vcpus"] == 1:  # templates from before the setting existed stay valid
        del shape["vcpus"]
    if not shape["disk"]:
        del shape["disk"]
    parts = [FORMAT, base.name, root, version, shape, slots, SIZE_MB.get(name, IMAGE_MB)]
    parts.append(hashlib.sha256(agent_archive()).hexdigest())
    parts.append(process.kernel_line(hardware, modules(hardware), 0))
    ports, drives = range(hardware.ports), range(hardware.drives + hardware.disk)
    words = process.argv(hardware, "ram", share=False, monitor=0, ports=ports, drives=drives)
    parts.append(words[words.index(process.BINARY) :])  # the words before it name the user
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load(folder: Path, expected: str) -> Template:
    """A template from disk. UnusableTemplate when parts, files or the host's clock rate differ from the manifest's."""
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        ram, state, stamp = folder / "ram", folder / "state", _stamp(folder)
        if manifest.format != FORMAT or manifest.key != expected:
            raise UnusableTemplate("it was built from other parts")
        if ram.stat().st_size != manifest.ram_bytes or hash_of(ram) != manifest.ram_hash:
            raise UnusableTemplate("its memory image was changed")
        if hash_of(state) != manifest.state_hash:
            raise UnusableTemplate("its device state was changed")
        if hash_of(folder / "fixed") != manifest.fixed_hash:
            raise UnusableTemplate("its list of fixed pages was changed")
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableTemplate(f"it cannot be read: {error}") from None
    if manifest.hardware.accel == "tcg":
        rate = process.tsc_khz()
        if abs(rate - manifest.tsc_khz) > 1e-3 * rate:
            raise UnusableTemplate(f"the host's clock counts {rate} kHz and the template's {manifest.tsc_khz}")
    return Template(folder=folder, manifest=manifest, stamp=stamp)


def _stamp(folder: Path) -> tuple[int, ...]:
    """Inode, size and times of a template's files; empty when one is missing."""
    try:
        statuses = [os.stat(folder / name) for name in FILES]
    except OSError:
        return ()
    return tuple(n for status in statuses for n in (status.st_ino, status.st_size, status.st_mtime_ns))


def hash_of(path: Path) -> str:
    """XXH3-128 of a file, as hex: it detects damage, not attacks."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


async def build(name: str, base: Path, hardware: Hardware, slots: int, folder: Path, version: str) -> Template:
    """Boot, open the slots, exercise them, freeze. VmhostError with the end of the serial log when it does not boot.

    A machine with drives is frozen with empty ones, and its only slot waits for an image.
    """
    started = time.monotonic()
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    try:
        initrd, serial = making / "initrd", making / "serial.log"
        with initrd.open("wb") as out:
            for part in _roots(name, base, hardware):
                with part.open("rb") as root:
                    shutil.copyfileobj(root, out)
            out.write(agent_archive())
        rate = process.tsc_khz()
        line = process.kernel_line(hardware, modules(hardware), rate)
        serial.touch()
        serial.chmod(0o666)  # QEMU runs as another user; nobody else can enter the folder
        memory = Memory(f"headrace-{name}", hardware.memory_mb << 20)
        with (base / "vmlinuz").open() as kernel, initrd.open() as root, serial.open("a") as log:
            given = [file.fileno() for file in (kernel, root, log)]
            paths = [descriptor(fd) for fd in given]
            extra = ("-kernel", paths[0], "-initrd", paths[1], "-append", line)
            drives = open_drives(hardware)
            try:
                machine = Qemu(
                    hardware, memory, share=True, drives=drives, serial=f"file:{paths[2]}", extra=extra, inherit=given
                )
            finally:
                for fd in drives:
                    os.close(fd)
        try:
            async with asyncio.timeout(BOOT_S[hardware.accel]):
                facts, surveyed = await _freeze(machine, name, len(drives), slots, making / "state")
        except (TimeoutError, SandboxLost, OSError) as error:
            dead = machine.process.poll() is not None
            machine.process.kill()
            machine.process.wait()
            why = machine.complaint() if dead else str(error) or f"no answer in {BOOT_S[hardware.accel]:g} s"
            raise VmhostError(f"the guest image does not boot ({_words(hardware)}): {why}; {_tail(serial)}") from None
        finally:
            machine.process.kill()
            await asyncio.to_thread(machine.process.wait)
            machine.close()
        initrd.unlink()
        memory.save(making / "ram")
        integrity.write(making, surveyed)
        manifest = Manifest(
            format=FORMAT,
            name=name,
            key=key(name, base, version, hardware, slots),
            qemu=version,
            hardware=hardware,
            kernel=packages.kernel_release(base),
            tsc_khz=rate,
            slots=slots,
            has_pytest=bool(facts.pop("pytest")),
            ram_bytes=(making / "ram").stat().st_size,
            ram_hash=hash_of(making / "ram"),
            state_hash=hash_of(making / "state"),
            fixed_hash=hash_of(making / "fixed"),
            built_s=round(time.monotonic() - started, 2),
            facts=facts,
            push_mb=SIZE_MB.get(name, IMAGE_MB),
        )
        return publish(making, folder, manifest)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def publish(making: Path, folder: Path, manifest: Manifest) -> Template:
    """Move a finished template to its place: whole or not at all, and read-only from then on."""
    (making / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for file in (*FILES, "manifest.json"):
        (making / file).chmod(0o444)
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)
    return Template(folder=folder, manifest=manifest, stamp=_stamp(folder))


def _roots(name: str, base: Path, hardware: Hardware) -> list[Path]:
    return [base / f"{'light' if hardware.drives else name}.cpio", base / "drives.cpio"]


def _words(hardware: Hardware) -> str:
    return f"{hardware.machine}, {hardware.accel}"


def _tail(serial: Path) -> str:
    """The last lines of the serial log, errors of the kernel and the agent first."""
    try:
        text = serial.read_text(errors="replace")
    except OSError:
        return "no serial log"
    copy = serial.parent.parent / "last-failed-boot.log"
    copy.write_text(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "headrace:" in line or "panic" in line or "Error" in line]
    return f"serial log ({copy}): " + (" | ".join(errors[-4:] or lines[-4:])[-900:] or "empty")


_WARM = {
    "README.md": b"# warm\n",
    "warm/__init__.py": b"",
    "warm/calc.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_warm.py": b"from warm.calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "tests/test_pytest.py": b"def test_add():\n    assert 1 + 1 == 2\n",
}


async def _freeze(
    machine: Qemu, name: str, drives: int, slots: int, state: Path
) -> tuple[dict[str, Any], integrity.Survey]:
    """From boot to the saved state: the machine's facts, and its fixed pages. The snapshot needs every port's host side
    connected, so the channels stay open until the end."""
    channels = [await Channel.connect(end, f"port {number}") for number, end in enumerate(machine.ports)]
    try:
        opened = await _ask(channels[0], _opening(name, drives, slots))
        facts = await _ask(channels[0], {"op": "facts"})
        for channel in channels[1:] if not drives else ():  # the slot of an image waits until it gets the image
            await _exercise(channel)
        if opened["pytest"]:
            await _ask(channels[1], *_files())
            plan = TestPlan(kind="pytest", paths=("tests/test_pytest.py",), timeout_s=120.0)
            await _ask(channels[1], *protocol.to_frame(RunTests(plan=plan)))
            await _ask(channels[1], {"op": "reset"})
        surveyed = await integrity.survey(partial(_ask, channels[0]))
        await _save(machine, state)
        return facts | {"pytest": opened["pytest"]}, surveyed
    finally:
        for channel in channels:
            channel.close("the template is done")
            await channel.ended


async def _save(machine: Qemu, state: Path) -> None:
    """Write the device state; the memory is in its file already. The machine is not stopped first: saving stops it, and
    a state that says ``running`` lets clones run without another command.
    """
    client = QMPClient("template")
    machine.monitor.setblocking(False)
    await client.connect(machine.monitor)
    fd = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        on = [{"capability": "x-ignore-shared", "state": True}, {"capability": "events", "state": True}]
        await client.execute("migrate-set-capabilities", {"capabilities": on})
        await client.execute("migrate-set-parameters", {"max-bandwidth": 10**12})
        client.send_fd_scm(fd)
        await client.execute("getfd", {"fdname": "state"})
        with client.listener("MIGRATION") as events:
            await client.execute("migrate", {"uri": "fd:state"})
            async for event in events:
                status = cast(dict[str, dict[str, str]], event)["data"]["status"]
                if status == "completed":
                    break
                if status in ("failed", "cancelled"):
                    raise SandboxLost(f"saving the machine {status}")
    finally:
        os.close(fd)
        await client.disconnect()


def _opening(name: str, drives: int, slots: int) -> dict[str, Any]:
    header: dict[str, Any] = {"op": "open_slots", "count": slots, "size_mb": SIZE_MB.get(name, IMAGE_MB)}
    return header | ({"drives": drives} if drives else {})


def _files() -> protocol.Frame:
    return {"op": "write_files", "paths": list(_WARM), "delete": []}, list(_WARM.values())


async def _exercise(channel: Channel) -> None:
    """Run an episode in a slot, so that its pages and caches are warm; then clear its workspace."""
    plan = TestPlan(paths=("tests/test_warm.py",), timeout_s=120.0)
    await _ask(channel, *_files())
    for operation, fine in (
        (Search(pattern="def add"), True),
        (Search(pattern=r"def \w+"), True),
        (ReadFile(path="warm/calc.py"), True),
        (RunTests(plan=plan), False),
        (ReplaceLines(path="warm/calc.py", first=2, last=2, text="    return a + b"), True),
        (RunTests(plan=plan), True),
        (PullTree(), True),
    ):
        header, bodies = protocol.to_frame(operation)
        answer, _ = await channel.call(header, bodies, 120.0)
        if answer.get("ok", True) is not fine:
            raise SandboxLost(f"{channel.name} does not work: {header['op']}: {answer}")
    await _ask(channel, {"op": "reset"})


async def _ask(channel: Channel, header: dict[str, Any], bodies: list[bytes] | None = None) -> dict[str, Any]:
    answer, _ = await channel.call(header, bodies or [], 120.0)
    if not answer.get("ok", True):
        raise SandboxLost(f"{channel.name}: {answer.get('error')}")
    return answer
