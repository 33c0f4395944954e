"""Workspaces as users of the agents API upload them, and small uploads of huge ones."""

import base64
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import forged


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
    """Small uploads of huge workspaces: a tar with a header of 64 MiB, bundles with 10 billion files and folders."""
    yield {"tar": base64.b64encode(forged.TARS["a long name of 64 MiB"]).decode()}
    repository = forged.repository_at(folder / "bombs")
    for mode, id in (("100644", forged.blob(repository, b"x")), ("40000", forged.empty_tree(repository))):
        forged.tower(repository, mode, id)
        yield {"bundle": base64.b64encode(forged.bundle(repository)).decode()}
