"""Workspaces as users of the agents API upload them, and small uploads of huge ones."""

import base64
import gzip
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path


def tar_of(pax: str = "", /, **entries: bytes | None) -> str:
    """Base64 of a tar; None: a symbolic link. pax: a field of an extended header that holds a number."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in entries.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.pax_headers = {"GNU.sparse.map": pax} if pax else {}
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content or b""))
    return base64.b64encode(stream.getvalue()).decode()


def bundle_of(folder: Path) -> str:
    """Base64 of a git bundle with one file."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "a.py").write_text("1")
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "a.py"), ("commit", "-qm", "x"), ("bundle", "create", "-q", "../b", "HEAD")):
        subprocess.run((*git, *words), check=True, capture_output=True)
    return base64.b64encode((folder / "b").read_bytes()).decode()


def bombs(folder: Path) -> Iterator[dict[str, str]]:
    """Small uploads of huge workspaces: a tar with a header of 64 MiB, a bundle with 10 billion files."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 64 << 20
    yield {"tar": base64.b64encode(gzip.compress(header.tobuf() + bytes(header.size), 1)).decode()}
    git = ("git", "-C", str(folder / "repository"), "-c", "user.name=a", "-c", "user.email=a@b")

    def run(*words: str, text: str = "") -> str:
        return subprocess.run((*git, *words), check=True, capture_output=True, text=True, input=text).stdout.strip()

    entry = f"100644 blob {run('hash-object', '-w', '--stdin', text='x')}"
    for _ in range(10):
        tree = run("mktree", text="".join(f"{entry}\t{n}\n" for n in range(10)))
        entry = f"040000 tree {tree}"
    run("update-ref", "HEAD", run("commit-tree", tree, "-m", "x"))
    run("bundle", "create", "-q", "../bomb", "HEAD")
    yield {"bundle": base64.b64encode((folder / "bomb").read_bytes()).decode()}
