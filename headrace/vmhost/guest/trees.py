"""Whole trees in and out as tar archives: exact modes, times and links. Loaded when first asked for.

The keeper unpacks under the tools' effective user, so an archive can reach what a tool could reach and nothing else.
Owners in it are ignored: whatever is written is the tools' user's.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from typing import Any

from .files import Answer, Refused, Workspace, shown

# Names of owners are not wanted, and looking them up would load whatever libraries an image's own configuration names.
tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]


def operate(space: Workspace, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer:
    """PushTar and PullTar."""
    if header["op"] == "push_tar":
        return push(space, header["path"], bodies[0])
    return pull(space, header["path"], header["limit"])


def push(space: Workspace, path: str, data: bytes) -> Answer:
    """Unpack over what is there."""
    root = space.resolve(path)
    try:
        os.makedirs(root, exist_ok=True)
        folders: list[tuple[str, tarfile.TarInfo]] = []
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
            for member in tar:
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts or member.name.startswith("/"):
                    raise Refused(f"{shown(member.name)}: an archive may not leave its folder")
                target = "/".join([root, *parts])
                _one(tar, member, root, target)
                if member.isdir():
                    folders.append((target, member))
        for target, member in reversed(folders):  # last, for a folder may forbid what has to go into it
            os.chmod(target, member.mode & 0o7777)
            os.utime(target, (member.mtime, member.mtime))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise Refused(f"this is no tar archive, or a damaged one: {error}") from None
    except OSError as error:
        raise Refused(f"{shown(str(error.filename or path))}: {error.strerror}") from None
    return {}, []


def _one(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str, target: str) -> None:
    parent = os.path.dirname(target)
    if target != root and not os.path.isdir(parent):
        os.makedirs(parent, exist_ok=True)
    if member.isdir():
        if os.path.islink(target) or not os.path.isdir(target):
            _away(target)
            os.mkdir(target, 0o755)
        os.chmod(target, 0o755)  # until everything is in it
        return
    _away(target)
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


def _away(target: str) -> None:
    if os.path.lexists(target):
        os.unlink(target)


def pull(space: Workspace, path: str, limit: int) -> Answer:
    """A file or a folder's whole content, paths relative to it. Sockets and devices stay."""
    root = space.resolve(path)
    out = io.BytesIO()
    total = 0

    def fits(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        total += member.size + 1024
        if total > limit:
            raise Refused(f"{shown(path)}: more than {limit >> 20} MiB")
        return member if not member.isdev() or member.isfifo() else None

    try:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            if os.path.isdir(root) and not os.path.islink(root):
                for name in sorted(os.listdir(root)):
                    tar.add(f"{root}/{name}", arcname=name, filter=fits)
            else:
                tar.add(root, arcname=os.path.basename(root), filter=fits)
    except OSError as error:
        raise Refused(f"{shown(str(error.filename or path))}: {error.strerror}") from None
    return {"data": 0}, [out.getvalue()]
