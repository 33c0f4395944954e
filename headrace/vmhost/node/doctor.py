"""Checks what this machine offers for sandboxes and what is missing, for `headrace check`; boots nothing."""

import os
import shutil
from pathlib import Path

import msgspec

from headrace.config import Environment
from headrace.vmhost import cgroups
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import packages
from headrace.vmhost.node import capacity
from headrace.vmhost.qemu import probe, process
from headrace.vmhost.templates import cache_gc

DISK_MB = 1500
"""Disk that the image, both templates and their build need, in MB."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report; `good` is False for a fact that keeps virtual machines from running."""

    good: bool
    text: str


def doctor(environment: Environment | None = None) -> list[Finding]:
    """All findings, the bad ones first. No machine is booted: that takes seconds, under TCG up to a minute."""
    wanted = environment or Environment()
    cache = Path(wanted.cache_dir).absolute()
    findings = [_qemu(), _tool("mmdebstrap", "makes the guest image", "mmdebstrap")]
    findings += [
        _tool("setpriv", "ends every QEMU with its parent", "util-linux"),
        _kvm(),
        memory(wanted),
        _disk(cache),
    ]
    base = packages.folder(cache)  # one of an earlier version would be booted anew at every call
    made = (base / "done").exists()
    able = findings[0].good and made
    unknown = able and probe.remembered(base, cache, process.version(), wanted.accel) is None
    if unknown:
        text = "no machine was booted here yet: `headrace vm run -- true` boots one, and so does a run"
        findings.append(Finding(True, text))
    elif able:
        findings.append(_probe(base, cache, wanted))
    elif not made:
        findings.append(Finding(True, f"no guest image in {cache} yet: the first run builds it (about half a minute)"))
    findings += [_rights(), _cgroups(), _memory_of_others()]
    if not unknown:  # which templates are in use depends on the machine that boots
        findings.append(_cache(wanted))
    return sorted(findings, key=lambda finding: finding.good)


def _cache(environment: Environment) -> Finding:
    entries = cache_gc.holdings(environment)
    unused = [entry for entry in entries if not entry.why]
    text = f"the cache has {len(entries)} entries, {sum(entry.mib for entry in entries):.0f} MiB"
    if unused:
        text += f", of which {sum(entry.mib for entry in unused):.0f} MiB are unused: headrace vm gc removes them"
    return Finding(True, text)


def _cgroups() -> Finding:
    places = cgroups.places()
    if places is not None:
        return Finding(
            True, f"every machine gets a control group of its own, with limits of {' and '.join(places.limits)}"
        )
    return Finding(
        True,
        "machines get no control groups: only their own memory and the number of clones limit them; "
        "start as root, or in a systemd unit with Delegate=yes and DelegateSubgroup=actors",
    )


def _rights() -> Finding:
    """The user that a QEMU runs as."""
    if os.geteuid() == 0:
        return Finding(True, "every QEMU runs as a user of its own without capabilities, in its own seccomp filter")
    return Finding(
        True,
        "every QEMU runs as this user in its own seccomp filter; as root, each gets a user of its own",
    )


def _memory_of_others() -> Finding:
    """Forks read a child's memory; the kernel's Yama module may allow that to root alone."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope > 1 and os.geteuid() != 0:
        return Finding(
            True, f"sandboxes cannot be forked: kernel.yama.ptrace_scope is {scope}; set it to 1, or run as root"
        )
    return Finding(True, "sandboxes can be forked: this user may read the memory of its own machines")


def _qemu() -> Finding:
    try:
        return Finding(True, f"QEMU {process.version()}")
    except VmhostError as error:
        return Finding(False, str(error))


def _tool(name: str, purpose: str, package: str) -> Finding:
    if shutil.which(name):
        return Finding(True, f"{name} is installed ({purpose})")
    return Finding(False, f"{name} is missing, which {purpose}: apt-get install {package}")


def _kvm() -> Finding:
    if reason := process.no_kvm():
        return Finding(True, f"{reason}; without it machines run under TCG, an emulation, some 20 times slower inside")
    return Finding(True, "/dev/kvm opens; booting a machine shows whether KVM works")


def _probe(base: Path, cache: Path, environment: Environment) -> Finding:
    try:
        accel, machine, why = probe.choose(base, cache, process.version(), environment.accel)
    except VmhostError as error:
        return Finding(False, str(error))
    return Finding(True, f"machines boot with {accel} on {machine}: {why}")


def memory(environment: Environment) -> Finding:
    """Whether the machines of this configuration fit into the memory that is free."""
    each = environment.memory_mb + capacity.OVERHEAD_MB
    fit = int((capacity.free_mb() - capacity.RESERVE_MB) // each)
    text = f"{capacity.free_mb():.0f} MB of memory are free, enough for {max(fit, 0)} machines of at most {each} MB"
    if fit < 2:
        return Finding(False, f"{text}; an agent and a judge need two: lower environment.memory_mb or free memory")
    if fit < environment.max_vms:
        return Finding(True, f"{text}, fewer than max_vms = {environment.max_vms}: requests will wait for capacity")
    return Finding(True, text)


def _disk(cache: Path) -> Finding:
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**20
    if free < DISK_MB and not any(cache.glob("base-*")):
        return Finding(False, f"{place} has {free:.0f} MB free; the guest image and its template need {DISK_MB} MB")
    return Finding(True, f"{place} has {free:.0f} MB free")
