"""Whether this machine has the disk, memory and QEMU that the run needs, and whether its folder is free."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config
from headrace.launch.checks.finding import Finding, Roles, bad, good, wanted
from headrace.launch.supervision.down import supervisor_of
from headrace.vmhost.backend import Demanding
from headrace.vmhost.backends.registry import backend_class
from headrace.vmhost.errors import VmhostError


def check(config: Config, roles: Roles = frozenset()) -> Iterator[Finding]:
    """Findings about [run], and about [environment] where sandboxes run. roles: as in `host.check`."""
    yield _folder(Path(config.run.dir), config.run.min_free_mb)
    if not wanted(roles, "environment"):
        return
    section = config.environment
    try:
        backend = backend_class(section.backend)
    except VmhostError as error:
        yield bad("environment.backend", str(error))
        return
    if isinstance(backend, Demanding):
        for need in backend.requirements(section):
            yield Finding(f"environment.{need.key}" if need.key else "environment", need.met, need.text)
    elif not backend.capabilities.isolated:
        yield good("environment", f"backend = {section.backend}: its sandboxes are NOT isolated")


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
