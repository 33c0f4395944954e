"""Images of other stores on this machine, such as the docker daemon's: copied into an archive by skopeo, then imported.

skopeo is a program of its own (Debian package ``skopeo``). The archive lies in the cache while it is imported.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from headrace import timed_commands
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from headrace.vmhost.images.imported import Image, Request

PROGRAM = "skopeo"
TRANSPORTS = ("docker-daemon:", "containers-storage:")
"""The stores that `headrace images` reads."""
COPY_S = 3600.0
_PREFIX = "copy-"


def take(cache: Path, source: str, request: Request) -> Image:
    """Import an image that skopeo names, such as ``docker-daemon:app:1``. VmhostError with skopeo's reason."""
    if shutil.which(PROGRAM) is None:
        raise VmhostError(f"{PROGRAM} is not installed: apt-get install {PROGRAM}, or import the output of docker save")
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob(f"{_PREFIX}*"):
        _remove_unused(left)
    reference = source.partition(":")[2].rpartition("]")[2].strip("/")
    with tempfile.TemporaryDirectory(dir=cache, prefix=_PREFIX) as name:
        folder = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            archive = Path(name) / "image.tar"
            copy = [PROGRAM, "copy", "--quiet", source, f"oci-archive:{archive}:{reference}"]
            done = timed_commands.run(copy, COPY_S)
            if done.returncode:
                raise VmhostError(f"{source} can't be imported: {_reason(done.stderr)}")
            return imported.take(cache, archive, request.name, "", request.memory_mb)
        except subprocess.TimeoutExpired:
            raise VmhostError(f"{PROGRAM} did not copy {source} within {COPY_S:g} s") from None
        finally:
            os.close(folder)


def _remove_unused(folder: Path) -> None:
    """Remove what a process left that died: a live one holds the lock of its folder."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _reason(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    text = (lines or ["skopeo gave no reason"])[-1]
    _, quote, message = text.partition('msg="')
    return (message.rstrip('"').replace('\\"', '"') if quote else text)[:400]
