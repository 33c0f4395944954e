"""Imported images: a user's container image (or bare root file system) in the cache, ready to be a template's root.

An image is ``root.cpio`` (everything under ``image/``, where the agent finds it) and ``image.json``: who its programs
run as, where, with which environment. It is named by its contents; a name is a link to it, so importing again under the
same name moves the name and leaves running templates alone until `gc`.

The root lies in the guest's RAM like the built-in ones: no disk to snapshot, and clones share its pages. So a machine
takes twice its image's size in memory while it boots, and images above `LARGEST` are refused.
"""

import fcntl
import hashlib
import re
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import cpio, oci
from headrace.vmhost.images.packages import FLAVOURS
from headrace.vmhost.images.rootfs import BadImage, Tree

LARGEST = 2 << 30
"""Unpacked bytes of the largest image that is taken."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}$")
WORKDIR = "/workspace"
"""Where programs of an image without a working directory start, and where its repository lies."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An imported image."""

    name: str
    digest: str
    """SHA-256 of its root and of all below: what a template is addressed by."""
    source: str
    bytes: int
    """Size of its root in a guest's memory."""
    entries: int
    skipped: int
    env: dict[str, str]
    uid: int
    gid: int
    groups: tuple[int, ...]
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    folder: str = ""

    @property
    def memory_mb(self) -> int:
        """Memory of its machines: while one boots its root is there twice, and the kernel gives the unpacked one half
        of what the packed one leaves."""
        root = -(-self.bytes // (1 << 20))
        return max(2 * root + 256, 3 * root + 128)


def take(cache: Path, path: Path, name: str = "", tag: str = "") -> Image:
    """Import an archive or a folder. VmhostError with one sentence."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # a process that finds unfinished work and no lock held removes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _take(cache, path, name, tag)


def _take(cache: Path, path: Path, name: str, tag: str) -> Image:
    making = Path(tempfile.mkdtemp(dir=cache, prefix="making-"))
    try:
        with ExitStack() as stack:
            spool = stack.enter_context((making / "spool").open("w+b"))
            outer = stack.enter_context((making / "outer").open("w+b"))
            tree = Tree(spool, LARGEST)
            settings = _read(path, stack, outer, tree, tag)
            named = name or _name(settings.tags[0] if settings.tags else path.name)
            if not NAME.match(named) or named in FLAVOURS:
                raise BadImage(f"an image cannot have the name {named!r}: choose another with --name")
            image = _describe(named, path, tree, settings)
            _write(making / "root.cpio", tree)
        return _keep(cache, making, image)
    except BadImage as bad:
        raise VmhostError(f"{path} can't be imported: {bad}") from None
    except oci.BROKEN as error:
        raise VmhostError(f"{path} can't be imported: it is damaged: {error or type(error).__name__}") from None
    except OSError as error:
        raise VmhostError(f"{path} can't be imported: {error.strerror or error}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def find(cache: Path, name: str) -> Image | None:
    """The image of a name, if it was imported."""
    return _load(cache / f"image-{name}") if NAME.match(name) else None


def names(cache: Path) -> list[str]:
    """Names of all imported images."""
    return sorted(path.name.removeprefix("image-") for path in cache.glob("image-*") if path.is_symlink())


def _load(folder: Path) -> Image | None:
    try:
        image = msgspec.json.decode((folder / "image.json").read_bytes(), type=Image)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(image, folder=str(folder.resolve()))


def _read(path: Path, stack: ExitStack, outer: IO[bytes], tree: Tree, tag: str) -> oci.Settings:
    if not path.exists():
        raise BadImage("there is no such file")
    if not path.is_file() and not path.is_dir():
        raise BadImage("it is neither a file nor a folder")
    try:
        source = oci.Source(path, stack, outer)
    except oci.BROKEN as error:
        raise BadImage(f"it is no tar archive, or a damaged one: {error or type(error).__name__}") from None
    if oci.is_image(source):
        return oci.read(source, tree, tag)
    if tag:
        raise BadImage(f"it is no container image and has no tag {tag!r}")
    if path.is_dir():
        tree.add_folder(path)
    else:
        for archive in source.tars():
            tree.add_tar(archive, 0)
    if tree.get("bin") is None and tree.get("usr") is None:
        raise BadImage("it is neither a container image nor a root file system: it has no /bin and no /usr")
    return oci.Settings()


def _describe(name: str, path: Path, tree: Tree, settings: oci.Settings) -> Image:
    size = tree.size()
    uid, gid, groups, home = _user(tree, settings.user)
    workdir = "/" + "/".join(part for part in settings.workdir.split("/") if part not in ("", "."))
    if ".." in workdir.split("/"):
        raise BadImage(f"its working directory {settings.workdir!r} leaves its root")
    return Image(
        name=name,
        digest=settings.digest,
        source=settings.tags[0] if settings.tags else path.name,
        bytes=size,
        entries=len(tree),
        skipped=tree.skipped,
        env={"PATH": PATH, "HOME": home} | settings.env,
        uid=uid,
        gid=gid,
        groups=groups,
        workdir=WORKDIR if workdir == "/" else workdir,
        entrypoint=settings.entrypoint,
        cmd=settings.cmd,
    )


def _user(tree: Tree, user: str) -> tuple[int, int, tuple[int, ...], str]:
    """uid, gid, further groups and home of ``user[:group]``, names looked up in the image as container engines do."""
    name, _, group = user.partition(":")
    accounts = [line.split(":") for line in (tree.read("etc/passwd") or b"").decode("utf-8", "replace").splitlines()]
    teams = [line.split(":") for line in (tree.read("etc/group") or b"").decode("utf-8", "replace").splitlines()]
    accounts = [row for row in accounts if len(row) >= 7 and row[2].isdigit() and row[3].isdigit()]
    teams = [row for row in teams if len(row) >= 4 and row[2].isdigit()]
    known = next((row for row in accounts if row[0] == name), None)
    known = known or next((row for row in accounts if row[2] == (name or "0")), None)
    if known is None and name and not name.isdigit():
        raise BadImage(f"it runs as {name!r}, whom its /etc/passwd does not know")
    uid = int(known[2]) if known else int(name or 0)
    gid = int(known[3]) if known else 0
    further = tuple(int(row[2]) for row in teams if known and known[0] in row[3].split(","))
    if group:
        found = next((row for row in teams if group in (row[0], row[2])), None)
        if found is None and not group.isdigit():
            raise BadImage(f"it runs in group {group!r}, which its /etc/group does not know")
        gid, further = int(found[2]) if found else int(group), ()
    if max(uid, gid) >= 1 << 32:
        raise BadImage(f"it runs as {user!r}, a number that no system has")
    return uid, gid, further, known[5] if known and known[5] else "/"


def _name(text: str) -> str:
    """A name out of a tag or a file name: ``ghcr.io/org/tool:1.2`` is ``tool-1.2``."""
    last = text.lower().rstrip("/").rpartition("/")[2]
    for ending in (".gz", ".zst", ".tgz", ".tar"):
        last = last.removesuffix(ending)
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:63]


def _write(target: Path, tree: Tree) -> None:
    with target.open("wb") as out:
        cpio.write(out, tree.entries("image"))


def _keep(cache: Path, making: Path, image: Image) -> Image:
    """Into the cache under its digest, and the name to it."""
    with (making / "root.cpio").open("rb") as root:
        digest = hashlib.file_digest(root, "sha256")
    digest.update(msgspec.json.encode(msgspec.structs.replace(image, name="", source="")))
    image = msgspec.structs.replace(image, digest=digest.hexdigest())
    (making / "image.json").write_bytes(msgspec.json.format(msgspec.json.encode(image)))
    for left in ("spool", "outer"):
        (making / left).unlink()
    folder = cache / f"root-{image.digest[:16]}"
    if not (folder / "image.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    link = making.parent / f"making-{image.name}-{image.digest[:16]}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(cache / f"image-{image.name}")
    return msgspec.structs.replace(image, folder=str(folder))
