"""A harness's bundle as a read-only file system below an image: the image's own files come first, and none is hidden.

The file system is made once from the bundle's folder, and lies next to it in the cache. A template's name carries the
bundle's digest behind `MARK`, so a machine with a harness is another template than one without.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.harnesses.bundles import FOLDER, Bundle
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import erofs, store
from headrace.vmhost.images.packages import FLAVOURS

MARK = "+harness-"
PLACE = ("opt", "headrace-harness")
"""The folder in a sandbox."""


def mounted(cache: Path, template: str, bundle: Bundle) -> tuple[str, str]:
    """The template with the bundle, and the bundle's folder in it. Makes the file system where it is missing.
    VmhostError."""
    if template in FLAVOURS:
        raise VmhostError(f"the template {template} holds no harness: give the task an image, or use backend = process")
    drive = cache / FOLDER / f"{bundle.digest}.drive"
    if not drive.exists():
        part = drive.with_name(f".{drive.name}.{os.getpid()}")
        part.mkdir()
        with (part / "blob").open("w+b") as blob:
            erofs.write(blob, _inside(_node(bundle.folder)))
            blob.truncate(store.DRIVE_BYTES)
        part.rename(drive)
    return f"{template}{MARK}{bundle.digest}", f"/{'/'.join(PLACE)}"


def segment(cache: Path, bundle: str) -> store.LayerSegment:
    """The file system of a bundle, by its digest. It was made by `mounted`."""
    return store.LayerSegment(chain=bundle, below=(), blob="", bytes=0, folder=str(cache / FOLDER / f"{bundle}.drive"))


def digest(image: str, bundle: str) -> str:
    """The content address of an image over a bundle."""
    return hashlib.sha256(f"{image} {bundle}".encode()).hexdigest()


def _inside(node: erofs.Node) -> erofs.Node:
    for name in reversed(PLACE):
        node = erofs.Node(stat.S_IFDIR | 0o755, children={name.encode(): node})
    return node


def _node(path: Path) -> erofs.Node:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = os.fsencode(os.readlink(path))
        return erofs.Node(stat.S_IFLNK | 0o777, size=len(target), data=target)
    if stat.S_ISDIR(mode):
        children = {os.fsencode(each.name): _node(each) for each in path.iterdir()}
        return erofs.Node(stat.S_IFDIR | 0o755, children=children)
    return erofs.Node(stat.S_IFREG | stat.S_IMODE(mode), size=path.stat().st_size, content=_content(path))


def _content(path: Path) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece

    return pieces
