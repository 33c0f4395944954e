"""Reads a user's files from a tar, a git bundle or a repository, with limits on their number and size.

The gateway runs no code of these files: git checks out without hooks and without the machine's configuration, and
connects only by https, to hosts that the operator named.
"""

import asyncio
import bz2
import io
import lzma
import os
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.gateway.agents.requests import AgentRefused, WorkspaceSource
from headrace.gateway.requests import MAX_FILES, safe_path

MOST_BYTES = 6 << 20
"""The most bytes of a workspace's files in all, because they are sent in one message."""
MOST_UNPACKED = 4 * MOST_BYTES
"""The most bytes of an uncompressed tar. Its headers are read into memory, and a small archive may hold a huge one."""
GIT_S = 120.0


async def files_of(source: WorkspaceSource, git_hosts: Sequence[str]) -> dict[str, bytes]:
    """The files of a source: path to content. AgentRefused with 400, 413 or 501."""
    given = [name for name in ("files", "tar", "bundle", "git") if getattr(source, name)]
    if len(given) > 1:
        raise _bad(f"expected one of files, tar, bundle and git, got {' and '.join(given)}")
    if source.tar:
        return await asyncio.to_thread(_from_tar, source.tar)
    if source.bundle:
        return await asyncio.to_thread(_from_bundle, source.bundle)
    if source.git is not None:
        parts = urlsplit(source.git.url)
        if parts.scheme != "https" or parts.hostname not in git_hosts:
            hosts = ", ".join(git_hosts) or "none"
            raise _bad(f"git.url: expected https:// and a host of [production] git_hosts ({hosts})")
        more = ["--depth", "1", *(["--branch", source.git.ref] if source.git.ref else [])]
        return await asyncio.to_thread(_cloned, source.git.url, more)
    return _bounded({path: text.encode() for path, text in source.files.items()})


def _from_tar(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(_uncompressed(data)), mode="r:") as archive:
            for member in archive:
                if member.isdir() or member.type in (tarfile.XGLTYPE, tarfile.XHDTYPE):
                    continue
                if not member.isfile():
                    raise _bad(f"tar: {member.name!r} is a link or a device; expected files and folders alone")
                total += member.size
                if total > MOST_BYTES or len(files) >= MAX_FILES:
                    raise _too_large()
                content = archive.extractfile(member)
                assert content is not None
                files[member.name.removeprefix("./")] = content.read()
    except (tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, OverflowError) as error:
        raise _bad(f"tar: expected a tar file in base64: {str(error)[:200]}") from None
    return _bounded(files)


def _uncompressed(data: bytes) -> bytes:
    """The archive without its compression. ValueError, zlib.error, OSError, EOFError, lzma.LZMAError; AgentRefused."""
    stream: Any
    if data.startswith(b"\x1f\x8b"):
        stream = zlib.decompressobj(wbits=31)
    elif data.startswith(b"BZh"):
        stream = bz2.BZ2Decompressor()
    elif data.startswith(b"\xfd7zXZ\0"):
        stream = lzma.LZMADecompressor(memlimit=128 << 20)
    else:
        return data
    plain: bytes = stream.decompress(data, MOST_UNPACKED + 1)
    if len(plain) > MOST_UNPACKED:
        raise _too_large()
    if not stream.eof or stream.unused_data.strip(b"\0"):
        raise ValueError("the compressed data is cut off, or other data follows it")
    return plain


def _from_bundle(data: bytes) -> dict[str, bytes]:
    with tempfile.NamedTemporaryFile(suffix=".bundle") as file:
        file.write(data)
        file.flush()
        return _cloned(file.name, [])


def _cloned(url: str, more: Sequence[str]) -> dict[str, bytes]:
    """The files of a repository's checked-out commit."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "tree"
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": folder,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "file:https",
        }
        options = ["-c", "core.hooksPath=/dev/null", "-c", "core.symlinks=false", "-c", "http.followRedirects=false"]
        _git(["git", *options, "clone", "-q", "--no-checkout", "--no-tags", *more, "--", url, str(target)], env)
        _refuse_large(target, env)
        _git(["git", "-C", str(target), *options, "checkout", "-q", "--force", "HEAD"], env)
        files: dict[str, bytes] = {}
        total = 0
        for path in sorted(target.rglob("*")):
            relative = path.relative_to(target)
            if relative.parts[0] == ".git" or path.is_symlink() or not path.is_file():
                continue
            total += path.stat().st_size
            if total > MOST_BYTES or len(files) >= MAX_FILES:
                raise _too_large()
            files[relative.as_posix()] = path.read_bytes()
    return _bounded(files)


def _git(argv: Sequence[str], env: dict[str, str]) -> None:
    """Run a command of git. AgentRefused."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, errors="replace", timeout=GIT_S)
    except FileNotFoundError:
        raise AgentRefused(501, "no_git", "this gateway has no git: send files or a tar") from None
    except subprocess.TimeoutExpired:
        raise _bad(f"git: the repository was not cloned within {GIT_S:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["git gave no reason"])[-1]
        raise _bad(f"git: the clone failed: {reason}")


def _refuse_large(repository: Path, env: dict[str, str]) -> None:
    """Add up the files before they are written: a small bundle may hold 10 billion of them. AgentRefused."""
    argv = ["git", "-C", str(repository), "ls-tree", "-r", "-l", "HEAD"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as listing:
        assert listing.stdout is not None
        total = number = 0
        for line in listing.stdout:
            size = line.partition(b"\t")[0].split()[-1]
            total, number = total + (int(size) if size.isdigit() else 0), number + 1
            if total > MOST_BYTES or number > MAX_FILES:
                listing.kill()
                raise _too_large()
    if listing.returncode:
        raise _bad("git: the repository has no commit that HEAD names; put HEAD into the bundle")


def _bounded(files: dict[str, bytes]) -> dict[str, bytes]:
    unsafe = next((path for path in files if not safe_path(path)), None)
    if unsafe is not None:
        raise _bad(f"expected relative paths without '..', got {unsafe[:80]!a}")
    if sum(map(len, files.values())) > MOST_BYTES:
        raise _too_large()
    return files


def _bad(text: str) -> AgentRefused:
    return AgentRefused(400, "invalid_workspace", text)


def _too_large() -> AgentRefused:
    text = f"a workspace holds at most {MAX_FILES} files and {MOST_BYTES} bytes; put larger ones into an image"
    return AgentRefused(413, "workspace_too_large", text)
