"""Reads a user's files from a tar, a git bundle or a repository, with limits on their number and size.

The gateway runs no code of these files: git checks out without hooks and without the machine's configuration, and
connects only by https, to hosts that the operator named.
"""

import asyncio
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from headrace.gateway.agents.requests import AgentRefused, WorkspaceSource
from headrace.gateway.requests import MAX_FILES, safe_path

MOST_BYTES = 6 << 20
"""The most bytes of a workspace's files in all, because they are sent in one message."""
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
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
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
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _bad(f"tar: expected a tar file in base64: {error}") from None
    return _bounded(files)


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
        argv = ["git", *options, "clone", "-q", "--no-tags", *more, "--", url, str(target)]
        try:
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=GIT_S)
        except FileNotFoundError:
            raise AgentRefused(501, "no_git", "this gateway has no git: send files or a tar") from None
        except subprocess.TimeoutExpired:
            raise _bad(f"git: the repository was not cloned within {GIT_S:g} s") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["git gave no reason"])[-1]
            raise _bad(f"git: the clone failed: {reason}")
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
