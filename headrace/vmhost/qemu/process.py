"""QEMU children: the command line and the process.

The device list of a template and of its clones comes from one function, because a snapshot only loads into the machine
that it was taken from. There is no network card and no entropy device: the root is in RAM, shared copy-on-write with
the template's file, and each slot has one serial port. A machine for images also has read-only drives. Their files are
inherited descriptors as well, and a clone may use other files than its template: equal sizes suffice. Behind them a
machine may have one writable drive, the disk of its writable layer.

A QEMU ends with the process that started it (PR_SET_PDEATHSIG, set by setpriv before the exec), also after a SIGKILL.
The signal belongs to the starting *thread*, so clones are started from the event loop's thread.

A QEMU that root starts runs as a user of its own without files, without capabilities and without a way to gain any, and
inside QEMU's seccomp sandbox. It inherits everything that it opens: memory, kernel, state, sockets (see memory). An
attacker who escapes from the guest controls a process that may read public files and cannot reach other machines.
"""

import ctypes
import itertools
import json
import mmap
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.qemu.memory import Memory

Accel = Literal["kvm", "tcg"]
MachineType = Literal["microvm", "q35"]
_ACCEL = {"tcg": ("-accel", "tcg,tb-size=32", "-cpu", "max"), "kvm": ("-accel", "kvm", "-cpu", "host")}
KVM = "/dev/kvm"
BINARY = "qemu-system-x86_64"
INSTALL = "apt-get install qemu-system-x86 mmdebstrap"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes a machine and must be equal in a template and its clones."""

    accel: Accel
    machine: MachineType
    memory_mb: int
    ports: int
    """Serial ports: the control port and one per slot."""
    drives: int = 0
    """Read-only drives, each of `store.DRIVE_BYTES`."""
    vcpus: int = 1
    disk: bool = False
    """A writable drive of that size behind them."""


def version() -> str:
    """Version of the installed QEMU. VmhostError when there is none."""
    if shutil.which(BINARY) is None:
        raise VmhostError(f"{BINARY} is not installed: {INSTALL}")
    text = subprocess.run([BINARY, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"version (.*)", text)
    if not match:
        raise VmhostError(f"{BINARY} does not run: reinstall it ({INSTALL})")
    return match[1]


def argv(
    hardware: Hardware,
    ram: str,
    *,
    share: bool,
    monitor: int,
    ports: Sequence[int],
    drives: Sequence[int] = (),
    serial: str = "null",
) -> list[str]:
    """The command line. `monitor` and `ports` are descriptors of connected sockets that the child inherits, `drives`
    those of files, the writable one last, `ram` the path of one for its memory."""
    kind = "device" if hardware.machine == "microvm" else "pci"
    machine = "microvm,rtc=on,pit=on,pic=on" if hardware.machine == "microvm" else "q35,usb=off,smbus=off,sata=off"
    line = [
        *("setpriv", *_nobody(hardware.accel), "--pdeathsig", "KILL", "--", BINARY),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-object", f"memory-backend-file,id=ram,size={hardware.memory_mb}M,mem-path={ram},share={_on(share)}"),
        *("-M", f"{machine},memory-backend=ram", "-m", str(hardware.memory_mb), "-smp", str(hardware.vcpus)),
        *_ACCEL[hardware.accel],
        *("-serial", serial),
        *("-device", f"virtio-serial-{kind},max_ports={hardware.ports + 1}"),
        *("-chardev", f"socket,id=mon,fd={monitor}", "-mon", "chardev=mon,mode=control"),
    ]
    for number, fd in enumerate(ports):
        line += ["-chardev", f"socket,id=c{number},fd={fd}"]
        line += ["-device", f"virtserialport,chardev=c{number},name=hr.{number},nr={number + 1}"]
    for number, fd in enumerate(drives):
        # A descriptor set: QEMU duplicates it, because its user may not open the file.
        file = {"driver": "file", "filename": f"/dev/fdset/{number + 1}", "locking": "off", "aio": "threads"}
        cache = {"direct": False, "no-flush": True}
        fixed = not hardware.disk or number < hardware.drives
        node = {"driver": "raw", "node-name": f"d{number}", "read-only": fixed, "cache": cache}
        line += ["-add-fd", f"fd={fd},set={number + 1}"]
        line += ["-blockdev", json.dumps(node | {"file": file | {"read-only": fixed}})]
        line += ["-device", f"virtio-blk-{kind},drive=d{number},id=vb{number},serial=hr{number}"]
    return line


_users = itertools.count()


def _nobody(accel: Accel) -> list[str]:
    """Arguments of setpriv that select an unused user; none without root's rights, because there are no rights to
    drop."""
    if os.geteuid() != 0:
        return []
    user = str(1 << 30 | (os.getpid() & 0x3FFF) << 16 | next(_users) & 0xFFFF)
    groups = ("--groups", str(os.stat(KVM).st_gid)) if accel == "kvm" else ("--clear-groups",)
    return ["--reuid", user, "--regid", user, *groups, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


def no_kvm(device: str = KVM) -> str:
    """Why a QEMU could not open the KVM device, and what to change; empty when it can."""
    try:
        mode = os.stat(device).st_mode
    except OSError:
        return f"no {device}"
    if os.geteuid() == 0:  # its QEMUs run as other users
        allowed = mode & 0o006 == 0o006 or mode & 0o060 == 0o060
        fix = "chgrp kvm and chmod 660 it"
        return "" if allowed else f"only root may open {device} and QEMU does not run as root: {fix}"
    return "" if os.access(device, os.R_OK | os.W_OK) else f"this user may not open {device}: add it to the group kvm"


def _on(value: bool) -> str:
    return "on" if value else "off"


def kernel_line(hardware: Hardware, modules: Sequence[str], tsc_khz: int) -> str:
    """The guest kernel's command line.

    The TSC options: a microVM under TCG has no reference to calibrate its clock against; without them it hangs or runs
    slow. Under emulation mitigations, SMAP, SMEP and five-level paging are off: they cost 5 to 7 %, and the emulator is
    the boundary. Under KVM the kernel's defaults stay.
    """
    words = ["console=ttyS0", "8250.nr_uarts=1", "quiet", "loglevel=4", "reboot=t", "panic=-1", "random.trust_cpu=on"]
    words += ["net.ifnames=0", f"headrace.ports={hardware.ports}", f"headrace.modules={','.join(modules)}"]
    if hardware.accel == "tcg":
        words += ["mitigations=off", "nosmap", "nosmep", "no5lvl", "clocksource=tsc", "tsc=reliable"]
        words += [f"tsc_early_khz={tsc_khz}"]
    return " ".join(words)


def tsc_khz() -> int:
    """Rate of the host's time stamp counter in kHz, measured over 60 ms: a guest under TCG reads the same counter."""
    code = bytes.fromhex("0f3148c1e2204809d0c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    anchor = ctypes.c_char.from_buffer(page)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))

    def sample() -> tuple[int, int]:
        """A pair (nanoseconds, ticks) read close together: the closest of 20 attempts."""
        best = (1 << 62, 0, 0)
        for _ in range(20):
            before = time.monotonic_ns()
            ticks = int(counter())
            after = time.monotonic_ns()
            best = min(best, (after - before, (before + after) // 2, ticks))
        return best[1], best[2]

    first = sample()
    time.sleep(0.06)
    last = sample()
    del anchor
    return round((last[1] - first[1]) * 1_000_000 / (last[0] - first[0]))


class Qemu:
    """One QEMU process. `ports` are the host's ends of its serial ports."""

    def __init__(
        self,
        hardware: Hardware,
        memory: Memory,
        *,
        share: bool,
        drives: Sequence[int] = (),
        serial: str = "null",
        extra: Sequence[str] = (),
        inherit: Sequence[int] = (),
        file_mib: int = 0,
    ) -> None:
        """extra: more words of the command line; inherit: more descriptors; file_mib: the largest file that the process
        may write, 0 for no limit."""
        pairs = [socket.socketpair() for _ in range(hardware.ports + 1)]
        theirs = [pair[1].fileno() for pair in pairs]
        line = argv(
            hardware, memory.path, share=share, monitor=theirs[0], ports=theirs[1:], drives=drives, serial=serial
        )
        limited = ["prlimit", f"--fsize={file_mib << 20}", "--"] if file_mib else []
        try:
            self.process = subprocess.Popen(
                [*limited, *line, *extra],
                pass_fds=[*theirs, memory.fd, *drives, *inherit],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C in the terminal must not reach it
            )
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            raise VmhostError(f"{error.filename} cannot be started: {error.strerror}; {INSTALL} util-linux") from None
        finally:
            for _, end in pairs:
                end.close()
        self.monitor = pairs[0][0]
        self.ports = [ours for ours, _ in pairs[1:]]
        self.pid = self.process.pid

    def complaint(self) -> str:
        """The last line that the ended process wrote to stderr."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        text = self.process.stderr.read() or b""
        lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it wrote no message"

    def close(self) -> None:
        """Close the host's ends."""
        for end in (self.monitor, *self.ports):
            end.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
