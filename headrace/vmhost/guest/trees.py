"""Trees as tar archives, in both directions, with exact modes, times and links. Loaded on first use.

The agent unpacks under the tools' effective user, so an archive can reach the files that a tool could reach and no
others. Owners in the archive are ignored: all files belong to the tools' user.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from typing import Any

from .files import Answer, Workspace
from .names import shown
from .walks import Budget, OperationError

# Names of owners are not used, and looking them up would load the libraries that an image's configuration names.
tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]


def _open_at_once(path: str, mode: str) -> Any:
    """In place of `open`: a file's lease or a pipe would make that wait."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW))


tarfile.bltn_open = _open_at_once  # type: ignore[attr-defined]


def operate(space: Workspace, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer:
    """PushTar and PullTar."""
    if header["op"] == "push_tar":
        return push(space, header["path"], bodies[0])
    return pull(space, header["path"], header["limit"])


def push(space: Workspace, path: str, data: bytes) -> Answer:
    """Unpack an archive; existing files are replaced. OperationError."""
    root = space.resolve(path)
    try:
        os.makedirs(root, exist_ok=True)
        folders: list[tuple[str, tarfile.TarInfo]] = []
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
            for member in tar:
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts or member.name.startswith("/"):
                    raise OperationError(f"{shown(member.name)}: a path in an archive may not leave its folder")
                target = "/".join([root, *parts])
                _extract(tar, member, root, target)
                if member.isdir():
                    folders.append((target, member))
        for target, member in reversed(folders):  # last, because a folder's mode may forbid writing into it
            os.chmod(target, member.mode & 0o7777)
            os.utime(target, (member.mtime, member.mtime))
    except (tarfile.TarError, EOFError, ValueError):
        raise OperationError("expected a tar archive (plain, gzip, bzip2 or xz), got damaged or other data") from None
    except OSError as error:
        raise OperationError(f"{shown(str(error.filename or path))}: {error.strerror}") from None
    return {}, []


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str, target: str) -> None:
    parent = os.path.dirname(target)
    if target != root and not os.path.isdir(parent):
        os.makedirs(parent, exist_ok=True)
    if member.isdir():
        if os.path.islink(target) or not os.path.isdir(target):
            _remove(target)
            os.mkdir(target, 0o755)
        os.chmod(target, 0o755)  # until its content is complete
        return
    _remove(target)
    if member.issym():
        os.symlink(member.linkname, target)
    elif member.islnk():
        os.link(f"{root}/{member.linkname}", target, follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(target, member.mode & 0o7777)
    elif member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            while piece := source.read(1 << 20):
                out.write(piece)
            os.fchmod(fd, member.mode & 0o7777)
        os.utime(target, (member.mtime, member.mtime))


def _remove(target: str) -> None:
    if os.path.lexists(target):
        os.unlink(target)


def pull(space: Workspace, path: str, limit: int) -> Answer:
    """A file, or the content of a folder with relative paths, as an archive. Sockets and devices are left out."""
    root = space.resolve(path)
    out = io.BytesIO()
    total = 0
    budget = Budget()

    def fits(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        budget.time()
        total += member.size + 1024
        if total > limit:
            raise OperationError(f"{shown(path)}: more than {limit >> 20} MiB")
        return member if not member.isdev() or member.isfifo() else None

    try:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            if os.path.isdir(root) and not os.path.islink(root):
                for name in sorted(os.listdir(root)):
                    tar.add(f"{root}/{name}", arcname=name, filter=fits)
            else:
                tar.add(root, arcname=os.path.basename(root), filter=fits)
    except OSError as error:
        raise OperationError(f"{shown(str(error.filename or path))}: {error.strerror or error}") from None
    return {"data": 0}, [out.getvalue()]
