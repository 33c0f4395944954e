"""Chooses accelerator and machine type by booting them, because a /dev/kvm that opens does not prove that KVM works.

Each candidate boots the kernel with one program that prints a marker. The order is kvm before tcg, microvm before q35;
the first candidate that prints the marker in time is chosen, and remembered until the host, its kernel or QEMU changes.
"""

import json
import os
import select
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import cpio
from headrace.vmhost.qemu import process
from headrace.vmhost.qemu.memory import Memory, descriptor
from headrace.vmhost.qemu.process import Accel, Hardware, MachineType

_MARKER = b"headrace-is-up"
_REMEMBERED = "probe.json"
_LIMIT_S = {"kvm": 8.0, "tcg": 60.0}
"""A kernel is up in 0.5 s under KVM and 2 s under TCG on a quiet machine."""


def remembered(base: Path, cache: Path, version: str, wanted: str = "auto") -> tuple[Accel, MachineType, str] | None:
    """What `choose` found under the same conditions; None when it would boot machines now."""
    try:
        before = json.loads((cache / _REMEMBERED).read_text())
        if before["conditions"] == _conditions(base, version, wanted):
            return before["accel"], before["machine"], before["why"]
    except (OSError, ValueError, KeyError):
        pass
    return None


def choose(base: Path, cache: Path, version: str, wanted: str = "auto") -> tuple[Accel, MachineType, str]:
    """Accelerator, machine type, and why in one sentence. VmhostError when nothing boots."""
    if before := remembered(base, cache, version, wanted):
        return before
    notes: list[str] = []
    accels: tuple[Accel, ...] = ("kvm", "tcg") if wanted == "auto" else (wanted,)  # type: ignore[assignment]
    machines: tuple[MachineType, ...] = ("microvm", "q35")
    for accel in accels:
        if accel == "kvm" and (reason := process.no_kvm()):
            notes.append(reason)
            continue
        for machine in machines:
            failure = boots(base, accel, machine)
            if not failure:
                why = f"{accel} with {machine}" + (f" ({'; '.join(notes)})" if notes else "")
                conditions = _conditions(base, version, wanted)
                choice = {"conditions": conditions, "accel": accel, "machine": machine, "why": why}
                with suppress(OSError):  # a cache of another user or on a read-only disk: the next run probes again
                    (cache / _REMEMBERED).write_text(json.dumps(choice))
                return accel, machine, why
            notes.append(f"{accel} with {machine}: {failure}")
    raise VmhostError(f"no virtual machine boots here: {'; '.join(notes)}")


def boots(base: Path, accel: Accel, machine: MachineType) -> str:
    """Boot to the marker. Returns why that failed; empty when it worked."""
    hardware = Hardware(accel=accel, machine=machine, memory_mb=128, ports=1)
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as folder:
        initrd = Path(folder, "initrd")
        script = b"#!/bin/busybox sh\necho %s > /dev/ttyS0\nwhile :; do /bin/busybox sleep 9; done\n" % _MARKER
        with initrd.open("wb") as out:
            busybox = _busybox(base)
            entries = [cpio.folder("bin"), cpio.folder("dev"), cpio.file("bin/busybox", busybox, 0o755)]
            entries += [cpio.device("dev/console", 5, 1, 0o600), cpio.device("dev/ttyS0", 4, 64)]
            cpio.write(out, [*entries, cpio.file("init", script, 0o755)])
        line = process.kernel_line(hardware, (), process.tsc_khz())
        ours, theirs = socket.socketpair()
        with ours, theirs, (base / "vmlinuz").open() as kernel, initrd.open() as root:
            given = [file.fileno() for file in (kernel, root, theirs)]
            extra = ["-kernel", descriptor(given[0]), "-initrd", descriptor(given[1]), "-append", line]
            extra += ["-chardev", f"socket,id=tty,fd={given[2]}"]
            memory = Memory("headrace-probe", hardware.memory_mb << 20)
            child = process.Qemu(hardware, memory, share=False, serial="chardev:tty", extra=extra, inherit=given)
            theirs.close()
            try:
                return _listen(ours, child, _LIMIT_S[accel])
            finally:
                child.process.kill()
                child.process.wait()
                child.close()


def _listen(serial: socket.socket, child: process.Qemu, limit: float) -> str:
    output, until = b"", time.monotonic() + limit
    while (left := until - time.monotonic()) > 0 and select.select([serial], [], [], left)[0]:
        data = serial.recv(4096)
        if not data:
            child.process.wait()
            return child.complaint()
        output += data
        if _MARKER in output:
            return ""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return f"no output within {limit:g} s" + (f"; the last line was: {lines[-1][:200]}" if lines else "")


def _busybox(base: Path) -> bytes:
    """The busybox of the light root. Archives that this package writes can be read in a few lines."""
    data = (base / "light.cpio").read_bytes()
    at = 0
    while data[at : at + 6] == b"070701":
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        size, length = fields[6], fields[11]
        name = data[at + 110 : at + 110 + length - 1]
        body = at + (110 + length + 3) // 4 * 4
        if name == b"bin/busybox":
            return data[body : body + size]
        at = body + (size + 3) // 4 * 4
    raise VmhostError("the guest image is damaged: it has no busybox; remove the cache folder and try again")


def _conditions(base: Path, version: str, wanted: str) -> list[str]:
    """Everything that a remembered choice depends on."""
    return [version, os.uname().release, _cpu(), _boot_id(), base.name, wanted, process.no_kvm()]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
