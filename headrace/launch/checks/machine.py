"""Whether this machine has the disk, memory and QEMU that the run needs, and whether its folder is free."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config
from headrace.launch.checks.finding import Finding, bad, good
from headrace.launch.supervision.down import supervisor_of
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.backends.registry import capabilities
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.doctor import doctor
from headrace.vmhost.qemu.process import no_kvm


def check(config: Config) -> Iterator[Finding]:
    """Findings about [run] and [environment]."""
    yield _folder(Path(config.run.dir), config.run.min_free_mb)
    section = config.environment
    try:
        backend = capabilities(section.backend)
    except VmhostError as error:
        yield bad("environment.backend", str(error))
        return
    if section.backend == "container":
        why = unavailable()
        text = "backend = container: sandboxes share this machine's kernel"
        yield bad("environment", f"{text}, and cannot be made: {why}") if why else good("environment", text)
        return
    if not backend.isolated:
        yield good("environment", f"backend = {section.backend}: sandboxes are plain processes and NOT isolated")
    if not backend.kernel_private:
        return
    if section.accel == "kvm" and (reason := no_kvm()):
        yield bad("environment.accel", f"{reason}; set environment.accel to auto or tcg, or give this user /dev/kvm")
    for finding in doctor(section):
        yield Finding("environment", finding.good, finding.text)


def _folder(root: Path, need_mb: int) -> Finding:
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return bad("run.dir", f"{existing} is not a folder that this user may write to; set another run.dir")
    if supervisor := supervisor_of(root):
        return bad("run.dir", f"a run is active in {root}/ (pid {supervisor}); end it (`headrace down`) or set run.dir")
    free = shutil.disk_usage(existing).free >> 20
    if free < need_mb:
        return bad("run.min_free_mb", f"{root}/ has {free} MiB of free disk, a run needs {need_mb}; free some space")
    return good("run.dir", f"{root}/ has {free} MiB of free disk")
