"""Archives that no ordinary program writes: any header, any number, any name, and trees that share one object."""

import gzip
import hashlib
import io
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def number(value: int, width: int = 12) -> bytes:
    """A number of a tar header: octal, or base 256 where it is negative or too large."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    bits = 8 * (width - 1)
    return (b"\xff" if value < 0 else b"\x80") + (value % (1 << bits)).to_bytes(width - 1, "big")


def header(name: bytes, size: int = 0, kind: bytes = b"0", link: bytes = b"", tail: bytes = b"") -> bytes:
    """A tar header with a right checksum. tail: from byte 345 on, where sparse files have their map."""
    block = bytearray(name[:100].ljust(100, b"\0") + b"0000644\0" + 2 * b"0000000\0" + number(size) + number(0))
    block += b" " * 8 + kind + link[:100].ljust(100, b"\0") + b"ustar\x0000"
    block = block.ljust(345, b"\0") + tail[:167].ljust(167, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """The data with zeros up to a whole block."""
    return data + bytes(-len(data) % 512)


def pax(kind: bytes = b"x", /, **records: str | bytes) -> bytes:
    """An extended header; __ in a name is a dot."""
    data = b""
    for key, value in records.items():
        text = value.encode() if isinstance(value, str) else value
        record = b" %s=%s\n" % (key.replace("__", ".").encode(), text)
        size = len(record)
        while size != len(b"%d" % size) + len(record):
            size = len(b"%d" % size) + len(record)
        data += b"%d" % size + record
    return header(b"pax", len(data), kind) + padded(data)


def file(name: bytes, data: bytes = b"1") -> bytes:
    """A whole regular file of a tar."""
    return header(name, len(data)) + padded(data)


END = bytes(1024)
TARS: dict[str, bytes] = {
    "a name that is not UTF-8": file(b"\xff") + END,
    "a pax name that is not UTF-8": pax(hdrcharset="BINARY", path=b"\xff") + file(b"a") + END,
    "a name above the folder": file(b"a/../../b") + END,
    "an absolute name": file(b"/etc/passwd") + END,
    "a name of 300 bytes": pax(path="x" * 300) + file(b"a") + END,
    "a path of 2,000 bytes": pax(path="x/" * 1000 + "a") + file(b"a") + END,
    "no name": file(b"") + END,
    "a symbolic link": header(b"a", 0, b"2", b"/etc") + END,
    "a hard link to a file outside": header(b"a", 0, b"1", b"/etc/passwd") + END,
    "a device": header(b"a", 0, b"3") + END,
    "a negative size": header(b"a", -512) + END,
    "a negative size in a pax header": pax(size="-512") + file(b"a") + END,
    "a long name of a negative size": header(b"././@LongLink", -512, b"L") + END,
    "an unknown member of a negative size": file(b"a") + header(b"b", -1536, b"q") + END,
    "a sparse map that is no number": pax(GNU__sparse__map="x") + file(b"a") + END,
    "a sparse file of 8 EiB": pax(GNU__sparse__map="0,1", GNU__sparse__size=str(2**63)) + file(b"a") + END,
    "an old sparse file that is cut off": header(b"a", 1, b"S", tail=b"\0" * 137 + b"\1") + b"x",
    "a chain of 2,000 long names": b"".join(header(b"n", 1, b"L") + padded(b"a") for _ in range(2000))
    + file(b"b")
    + END,
    "a long name of 64 MiB": gzip.compress(header(b"././@LongLink", 64 << 20, b"L") + bytes(64 << 20), 1),
    "a damaged second header": file(b"a") + file(b"b").replace(b"0000644", b"0000645") + END,
    "a file that is cut off": file(b"a", b"x" * 2000)[:1500],
    "a file of 8 TiB": header(b"a", 1 << 43) + END,
    "a gzip stream that is cut off": gzip.compress(file(b"a") + END)[:-9],
    "data after the gzip stream": gzip.compress(file(b"a") + END) + b"more",
    "an xz stream with a dictionary of 1.5 GiB": bytes.fromhex("fd377a585a000004e6d6b4460200210125000000") + b"x" * 64,
    "nothing": b"",
    "no archive": b"x" * 2000,
}
"""Each must be refused, by limits of 10,000 files and 6 MiB."""


def zipped(change: Callable[[zipfile.ZipInfo], None] = lambda info: None, name: str = "a", data: bytes = b"1") -> bytes:
    """A zip with one file. change: its entry, before it is written."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo(name)
        info.compress_type = zipfile.ZIP_DEFLATED
        change(info)
        archive.writestr(info, data)
    return stream.getvalue()


def same_file(times: int) -> bytes:
    """A zip whose directory names one file of 1 MiB many times."""
    data = zipped(data=bytes(1 << 20))
    at = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    entry = data[at:end]
    tail = bytearray(data[end:])
    tail[8:10] = tail[10:12] = times.to_bytes(2, "little")
    tail[12:16] = (len(entry) * times).to_bytes(4, "little")
    return data[:at] + entry * times + tail


def git(repository: Path, *words: str, data: bytes = b"") -> str:
    """The output of a git command."""
    argv = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, check=True, capture_output=True, input=data).stdout.decode().strip()


def commit_of(repository: Path, *entries: tuple[str, bytes, str]) -> str:
    """A commit of a tree with these entries of mode, name and object, whatever their names are. It becomes HEAD."""
    raw = b"".join(mode.encode() + b" " + name + b"\0" + bytes.fromhex(id) for mode, name, id in entries)
    tree = git(repository, "hash-object", "-t", "tree", "-w", "--literally", "--stdin", data=raw)
    commit = git(repository, "commit-tree", tree, "-m", "x")
    git(repository, "update-ref", "HEAD", commit)
    return commit


def repository_at(folder: Path) -> Path:
    """A new repository without commits."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    return folder


def armed(repository: Path) -> Path:
    """Make git run a program in this new repository wherever its configuration can: for signatures, for changed files,
    for missing objects. The signed commit HEAD changes x.py and test_x.py; the content of x.py is missing. Returns the
    file that the program appends to."""
    ran, program = repository.parent / "ran", repository.parent / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {ran}\nexit 1\n')
    program.chmod(0o755)
    git(repository, "config", "core.repositoryFormatVersion", "1")
    settings = {"log.showSignature": "true", "gpg.program": program, "core.fsmonitor": program}
    settings |= {"core.untrackedCache": "true", "extensions.partialClone": "far", "remote.far.promisor": "true"}
    for key, value in (settings | {"remote.far.url": repository, "remote.far.uploadpack": program}).items():
        git(repository, "config", key, str(value))
    here, missing = blob(repository, b"x"), "1" * 40
    parent = commit_of(repository, ("100644", b"test_x.py", here), ("100644", b"x.py", here))
    lines = f"100644 blob {blob(repository, b'y')}\ttest_x.py\n100644 blob {missing}\tx.py\n"
    tree = git(repository, "mktree", "--missing", data=lines.encode())
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n x\n -----END PGP SIGNATURE-----\n"
    names = f"parent {parent}\nauthor A <a@b> 0 +0000\ncommitter A <a@b> 0 +0000\n"
    raw = f"tree {tree}\n{names}{signature}\nsigned\n"
    git(
        repository, "update-ref", "HEAD", git(repository, "hash-object", "-tcommit", "-w", "--stdin", data=raw.encode())
    )
    ran.unlink(missing_ok=True)
    return ran


def blob(repository: Path, data: bytes) -> str:
    """The id of a stored blob."""
    return git(repository, "hash-object", "-w", "--stdin", data=data)


def tower(repository: Path, mode: str, id: str, levels: int = 10) -> str:
    """A commit with ten to the power of `levels` entries of one object: each level names the one below ten times."""
    for _ in range(levels - 1):
        mode, id = "40000", git(repository, "mktree", data=listing(mode, id))
    return commit_of(repository, *((mode, b"%d" % n, id) for n in range(10)))


def listing(mode: str, id: str) -> bytes:
    """Ten entries of one object, as mktree reads them."""
    kind = "tree" if mode == "40000" else "blob"
    return "".join(f"{mode:0>6} {kind} {id}\t{n}\n" for n in range(10)).encode()


def empty_tree(repository: Path) -> str:
    """The id of the empty tree, which is stored."""
    return git(repository, "mktree")


def bundle(repository: Path) -> bytes:
    """A bundle of HEAD."""
    path = repository.resolve() / "b.bundle"
    git(repository, "bundle", "create", "-q", str(path), "HEAD")
    return path.read_bytes()


def huge_delta(size: int) -> bytes:
    """A bundle of a blob and a delta to it whose result has `size` bytes, made of copies of the blob."""
    base = bytes(1 << 16)
    ref = hashlib.sha1(b"blob %d\0" % len(base) + base).digest()
    delta = varint(len(base)) + varint(size) + b"\x80" * (size >> 16)  # each copies 64 KiB from offset 0
    head = bytes([0xB0 | (len(base) & 15)]) + varint(len(base) >> 4)
    pack = b"PACK" + struct.pack(">II", 2, 2) + head + zlib.compress(base)
    pack += bytes([0xF0 | (len(delta) & 15)]) + varint(len(delta) >> 4) + ref + zlib.compress(delta)
    return b"# v2 git bundle\n" + ref.hex().encode() + b" HEAD\n\n" + pack + hashlib.sha1(pack).digest()


def varint(value: int) -> bytes:
    """Seven bits in a byte, the lowest first."""
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])
