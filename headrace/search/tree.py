"""A Merkle tree over the files of a workspace: one hash per file, per folder, and one for the whole.

Two trees with one root hold the same files. A comparison of two trees skips folders with equal hashes.
"""

from collections.abc import Mapping
from hashlib import blake2b


class Folder:
    """A folder of the tree; `hash` covers names and contents of everything below."""

    __slots__ = ("files", "folders", "hash")

    def __init__(self, files: dict[str, str], folders: dict[str, "Folder"]) -> None:
        self.files, self.folders = files, folders
        self.hash: str
        digest = blake2b(digest_size=16)
        for name, value in sorted(files.items()):
            digest.update(b"f%s\0%s\0" % (name.encode("utf-8", "surrogatepass"), value.encode()))
        for name, folder in sorted(folders.items()):
            digest.update(b"d%s\0%s\0" % (name.encode("utf-8", "surrogatepass"), folder.hash.encode()))
        self.hash = digest.hexdigest()


def content_hash(data: bytes) -> str:
    """The hash of a file's bytes."""
    return blake2b(data, digest_size=16).hexdigest()


def tree(files: Mapping[str, str]) -> Folder:
    """The tree of path to content hash."""
    here: dict[str, str] = {}
    below: dict[str, dict[str, str]] = {}
    for path, value in files.items():
        head, slash, rest = path.partition("/")
        if slash:
            below.setdefault(head, {})[rest] = value
        else:
            here[head] = value
    return Folder(here, {name: tree(inner) for name, inner in below.items()})


def changes(before: Folder | None, after: Folder | None, prefix: str = "") -> tuple[list[str], list[str]]:
    """(new or changed paths, removed paths) from one tree to another, each sorted."""
    if before is not None and after is not None and before.hash == after.hash:
        return [], []
    old, new = (before or Folder({}, {})), (after or Folder({}, {}))
    changed = [prefix + name for name, value in new.files.items() if old.files.get(name) != value]
    removed = [prefix + name for name in old.files if name not in new.files]
    for name in {*old.folders, *new.folders}:
        more, fewer = changes(old.folders.get(name), new.folders.get(name), f"{prefix}{name}/")
        changed += more
        removed += fewer
    return sorted(changed), sorted(removed)
