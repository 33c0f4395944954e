"""Imported images: a user's container image (or bare root file system) in the store, ready to be a machine's root.

An image is a folder ``root-<digest>`` with ``image.json``: the user, folder and environment of its programs, and the
segments of the store that hold its files (see store). It is named by its contents; a name is a link to it, so a second
import under the same name moves the name; running machines are not affected, and `gc` removes the old folder.

No template is made for an image: its machines are clones of one generic template and attach the segments as drives.
Their memory does not depend on the image's size.
"""

import fcntl
import hashlib
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import mounting, oci, store
from headrace.vmhost.images.packages import FLAVOURS
from headrace.vmhost.images.rootfs import BadImage, Tree

LARGEST = store.DRIVE_BYTES
"""Unpacked bytes of the largest image that is taken."""
MEMORY_MB = 512
"""Memory of a machine whose image and task ask for none."""
_NO_ID = (1 << 32) - 1
"""The number that the kernel takes for "unchanged"; ids of users and groups are below it."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
MOUNTED = ("dev", "proc", "sys")
FOLDERS = (*MOUNTED, "etc", "tmp")
"""Folders that a sandbox mounts over, and those that it writes to before the image is its root."""
WORKDIR = "/workspace"
"""Where programs of an image without a working directory start, and where its repository lies."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An imported image."""

    name: str
    digest: str
    """SHA-256 of its layers and its settings."""
    source: str
    tags: tuple[str, ...]
    """References by which a task may name it."""
    layers: tuple[str, ...]
    """Chain ids of its layers."""
    boundaries: tuple[str, ...]
    """Chain ids at which its segments end, the bottom first."""
    bytes: int
    """Size of its files, unpacked."""
    entries: int
    skipped: int
    env: dict[str, str]
    uid: int
    gid: int
    groups: tuple[int, ...]
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    memory_mb: int = MEMORY_MB
    """Memory of its machines."""
    folder: str = ""
    harness: str = ""
    """The digest of the bundle that lies below its segments (images/mounting.py)."""

    @property
    def drives(self) -> int:
        """Number of `segments`."""
        return len(self.boundaries) + bool(self.harness)

    def segments(self) -> list[store.LayerSegment]:
        """Its segments, the bottom first. VmhostError when the store lost one."""
        cache = Path(self.folder).parent
        parts = store.segments(cache, self.boundaries)
        if parts is None:
            raise VmhostError(f"the image store lost files of {self.name}: import or pull it again")
        return [mounting.segment(cache, self.harness), *parts] if self.harness else parts


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """How an image is to be stored."""

    name: str = ""
    """Its name in the store; empty: made of its tag or its source."""
    tag: str = ""
    """The tag of the image, in an archive of several images."""
    memory_mb: int = MEMORY_MB
    """Memory of its machines."""


def take(cache: Path, path: Path, name: str = "", tag: str = "", memory_mb: int = MEMORY_MB, source: str = "") -> Image:
    """Import an archive or a folder. source: its name in messages, where it is not its path. VmhostError with one
    sentence."""
    source = source or str(path)
    request = Request(name=name, tag=tag, memory_mb=memory_mb)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # a process that finds unfinished work and no lock held removes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        making = Path(tempfile.mkdtemp(dir=cache, prefix="making-"))
        try:
            return _take(cache, making, path, source, request)
        except BadImage as bad:
            raise VmhostError(f"{source} can't be imported: {bad}") from None
        except oci.BROKEN as error:
            text = str(error).replace("\n", " ")[:300] or type(error).__name__
            raise VmhostError(f"{source} can't be imported: it is damaged: {text}") from None
        except OSError as error:
            raise VmhostError(f"{source} can't be imported: {error.strerror or error}") from None
        finally:
            shutil.rmtree(making, ignore_errors=True)


def _take(cache: Path, making: Path, path: Path, source: str, request: Request) -> Image:
    with ExitStack() as stack:
        spool = stack.enter_context((making / "spool").open("w+b"))
        outer = stack.enter_context((making / "outer").open("w+b"))
        tree = Tree(spool, LARGEST)
        others = images(cache)
        builder = store.Builder(cache, making, tree, stack, [(image.layers, image.boundaries) for image in others])
        settings = _read(path, request.tag, stack, outer, tree, builder)
        named = request.name or name_of(settings.tags[0] if settings.tags else source)
        if not NAME.match(named) or named in FLAVOURS:
            raise BadImage(f"an image cannot have the name {named!r}: choose another with --name")
        image = _describe(named, source, tree, settings)
        builder.finish()
        image = msgspec.structs.replace(
            image, layers=builder.layers, boundaries=builder.boundaries, memory_mb=request.memory_mb
        )
        stored = _keep(cache, making, image)
        if builder.shared:
            _split_others(cache, making, others, stored, builder.shared)
        return stored


def _split_others(cache: Path, making: Path, others: Sequence[Image], new: Image, at: int) -> None:
    """Let other images use the shared segment too: those whose single segment holds the layers that the new image
    shares."""
    for number, image in enumerate(others):
        if len(image.boundaries) == 1 and len(image.layers) > at and image.layers[:at] == new.layers[:at]:
            work = making / f"split-{number}"
            work.mkdir()
            whole = image.segments()
            boundaries = store.split(cache, work, image.layers, image.boundaries, at)
            _record(Path(image.folder), making, msgspec.structs.replace(image, boundaries=boundaries, folder=""))
            _drop_unused(cache, whole)


def _drop_unused(cache: Path, parts: Sequence[store.LayerSegment]) -> None:
    """Remove segments that no image uses any more. Machines keep the files that they have open, and a host finds that
    its image's record changed before it starts another machine."""
    images_left = [image for image in map(_load, cache.glob("root-*")) if image is not None]
    used = {image.boundaries[:end] for image in images_left for end in range(1, len(image.boundaries) + 1)}
    for part in parts:
        if (*part.below, part.chain) not in used:
            shutil.rmtree(part.folder, ignore_errors=True)


def _record(folder: Path, making: Path, image: Image) -> None:
    """Write an image's description, whole or not at all."""
    (making / "record").write_bytes(msgspec.json.format(msgspec.json.encode(image)))
    (making / "record").replace(folder / "image.json")


def find(cache: Path, name: str) -> Image | None:
    """The image of a name, a reference or a digest, if it was imported; with the harness that the name carries."""
    name, _, harness = name.partition(mounting.MARK)
    if harness:
        image = find(cache, name)
        return image and msgspec.structs.replace(image, digest=mounting.digest(image.digest, harness), harness=harness)
    named = _load(cache / f"image-{name}") if NAME.match(name) else None
    if named is not None:
        return named
    wanted = {name, full(name)}
    for image in images(cache):
        if wanted & {image.digest, f"sha256:{image.digest}", *image.tags, *map(full, image.tags)}:
            return image
    return None


def images(cache: Path) -> list[Image]:
    """All images that have a name, each once."""
    folders = {(cache / f"image-{name}").resolve() for name in names(cache)}
    loaded = [_load(folder) for folder in sorted(folders)]
    return [image for image in loaded if image is not None]


def full(reference: str) -> str:
    """A reference with registry and tag, as docker reads it: ``app`` is ``docker.io/library/app:latest``."""
    name, at, digest = reference.partition("@")
    first, slash, _ = name.partition("/")
    if not slash or not (set(".:") & set(first) or first == "localhost"):
        name = f"docker.io/{name}" if slash else f"docker.io/library/{name}"
    if not at and ":" not in name.rpartition("/")[2]:
        name += ":latest"
    return name + at + digest


def references(cache: Path) -> set[str]:
    """All texts by which `find` finds an image of the store, digests included."""
    out = set(names(cache))
    for image in images(cache):
        out |= {image.digest, f"sha256:{image.digest}"}
        for tag in image.tags:
            long = full(tag)
            for short in (tag, long, long.removeprefix("docker.io/"), long.removeprefix("docker.io/library/")):
                out |= {short, short.removesuffix(":latest")}
    return out


def names(cache: Path) -> list[str]:
    """Names of all imported images."""
    return sorted(path.name.removeprefix("image-") for path in cache.glob("image-*") if path.is_symlink())


def _load(folder: Path) -> Image | None:
    try:
        image = msgspec.json.decode((folder / "image.json").read_bytes(), type=Image)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(image, folder=str(folder.resolve()))


def _read(path: Path, tag: str, stack: ExitStack, outer: IO[bytes], tree: Tree, builder: store.Builder) -> oci.Settings:
    if not path.exists():
        raise BadImage("there is no such file")
    if not path.is_file() and not path.is_dir():
        raise BadImage("it is neither a file nor a folder")
    try:
        source = oci.Source(path, stack, outer)
    except oci.BROKEN as error:
        raise BadImage(f"it is no tar archive, or a damaged one: {error or type(error).__name__}") from None
    if oci.is_image(source):
        return oci.read(source, tree, tag, builder)
    if tag:
        raise BadImage(f"it is no container image and has no tag {tag!r}")
    if path.is_dir():
        tree.add_folder(path)
    else:
        tree.add_tar(source.entries(), 0)
    if tree.get("bin") is None and tree.get("usr") is None:
        raise BadImage("it is neither a container image nor a root file system: it has no /bin and no /usr")
    return oci.Settings()


def _describe(name: str, source: str, tree: Tree, settings: oci.Settings) -> Image:
    size = tree.size()
    uid, gid, groups, home = _user(tree, settings.user)
    workdir = "/" + "/".join(part for part in settings.workdir.split("/") if part not in ("", "."))
    if ".." in workdir.split("/"):
        raise BadImage(f"its working directory {settings.workdir!r} leaves its root")
    _check_folders(tree, workdir)
    for variable, value in settings.env.items():
        if not variable or "\0" in variable + value:
            raise BadImage(f"its environment has {f'{variable}={value}'[:80]!r}, which no program can get")
    return Image(
        name=name,
        digest=settings.digest,
        source=settings.tags[0] if settings.tags else Path(source).name,
        tags=settings.tags,
        layers=(),
        boundaries=(),
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


def _check_folders(tree: Tree, workdir: str) -> None:
    """BadImage where the folders that a sandbox mounts or writes to at its start are something else: it could not
    start, and a link would be followed outside of the image."""
    for name in FOLDERS:
        inode = tree.get(name)
        if inode is not None and not stat.S_ISDIR(inode.mode):
            kind = "a link" if stat.S_ISLNK(inode.mode) else "no folder"
            raise BadImage(f"its /{name} is {kind}; expected a folder, or nothing")
    path = tree.resolve(workdir)
    inode = tree.get(path)
    if path.partition("/")[0] in MOUNTED or (inode is not None and not stat.S_ISDIR(inode.mode)):
        raise BadImage(f"its working directory {workdir!r} is no folder of its own")


def _user(tree: Tree, user: str) -> tuple[int, int, tuple[int, ...], str]:
    """uid, gid, further groups and home of ``user[:group]``, names looked up in the image as container engines do."""
    name, _, group = user.partition(":")
    accounts = [line.split(":") for line in (tree.read("etc/passwd") or b"").decode("utf-8", "replace").splitlines()]
    teams = [line.split(":") for line in (tree.read("etc/group") or b"").decode("utf-8", "replace").splitlines()]
    accounts = [row for row in accounts if len(row) >= 7 and _is_id(row[2]) and _is_id(row[3])]
    teams = [row for row in teams if len(row) >= 4 and _is_id(row[2])]
    account = next((row for row in accounts if row[0] == name), None)
    account = account or next((row for row in accounts if row[2] == (name or "0")), None)
    if account is None and name and not _is_id(name):
        raise BadImage(f"it runs as {name!r}, and its /etc/passwd has no such user")
    uid = int(account[2]) if account else int(name or 0)
    gid = int(account[3]) if account else 0
    further = tuple(
        int(row[2]) for row in teams if account and account[0] in row[3].split(",") and int(row[2]) < _NO_ID
    )
    if group:
        team = next((row for row in teams if group in (row[0], row[2])), None)
        if team is None and not _is_id(group):
            raise BadImage(f"it runs in group {group!r}, and its /etc/group has no such group")
        gid, further = int(team[2]) if team else int(group), ()
    if max(uid, gid) >= _NO_ID:
        raise BadImage(f"it runs as {user!r}, expected numbers below {_NO_ID}")
    return uid, gid, further, account[5] if account and account[5] else "/"


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def name_of(text: str) -> str:
    """A name out of a tag or a file name: ``ghcr.io/org/tool:1.2`` is ``tool-1.2``."""
    last = text.lower().rstrip("/").rpartition("/")[2]
    for ending in (".gz", ".zst", ".tgz", ".tar"):
        last = last.removesuffix(ending)
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:63]


def _keep(cache: Path, making: Path, image: Image) -> Image:
    """Move the image into the cache under its digest, and point the name at it."""
    content = msgspec.structs.replace(image, name="", source="", tags=(), boundaries=(), bytes=0, skipped=0)
    image = msgspec.structs.replace(image, digest=hashlib.sha256(msgspec.json.encode(content)).hexdigest())
    folder = cache / f"root-{image.digest[:16]}"
    folder.mkdir(exist_ok=True)
    before = _load(folder)
    if before is not None:  # the stored one keeps the references by which tasks name it
        image = msgspec.structs.replace(image, tags=tuple(dict.fromkeys((*before.tags, *image.tags))))
    _record(folder, making, image)
    link = making.parent / f"making-{image.name}-{image.digest[:16]}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(cache / f"image-{image.name}")
    return msgspec.structs.replace(image, folder=str(folder))
