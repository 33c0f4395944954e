"""Reads a user's files from a tar, a git bundle or a repository, with limits on their number and size.

The gateway runs no code of these files: git checks nothing out, reads no configuration of the machine, and connects
only by https, to hosts that the operator named.
"""

import asyncio
import io
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace import timed_commands
from headrace.archives import commits, members, tars
from headrace.archives.commits import GIT_S
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge
from headrace.gateway.agents.requests import AgentRefused, WorkspaceSource, host_of
from headrace.gateway.requests import MAX_FILES, refused_paths

MOST_BYTES = 6 << 20
"""The most bytes of a workspace's files in all, because they are sent in one message."""
_LIMITS = ArchiveLimits(MAX_FILES, MOST_BYTES)
_GIT_MEMORY = "256m"
"""The most that git may allocate at once: a delta of a few bytes may name a result of terabytes."""
_BUNDLES = (b"# v2 git bundle\n", b"# v3 git bundle\n")


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
        if not source.git.url.startswith("https://") or host_of(source.git.url) not in git_hosts:
            hosts = ", ".join(git_hosts) or "none"
            raise _bad(f"git.url: expected https:// and a host of [production] git_hosts ({hosts})")
        more = ["--depth", "1", *(["--branch", source.git.ref] if source.git.ref else [])]
        return await asyncio.to_thread(_cloned, source.git.url, more)
    return _bounded({path: text.encode() for path, text in source.files.items()})


def _from_tar(data: bytes) -> dict[str, bytes]:
    try:
        files = dict(members.files_of(tars.members(io.BytesIO(data), _LIMITS), skip_links=False))
    except ArchiveTooLarge:
        raise _too_large() from None
    except ArchiveRefused as error:
        raise _bad(f"tar: expected a tar file in base64: {error}") from None
    return _bounded(files)


def _from_bundle(data: bytes) -> dict[str, bytes]:
    # git takes a file that begins with "gitdir: " for the place of a repository on this machine.
    if not data.startswith(_BUNDLES):
        raise _bad("bundle: expected a git bundle in base64, as `git bundle create` writes it")
    with tempfile.NamedTemporaryFile(suffix=".bundle") as file:
        file.write(data)
        file.flush()
        return _cloned(file.name, [])


def _cloned(url: str, more: Sequence[str]) -> dict[str, bytes]:
    """The files of the commit that a repository's HEAD names."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "tree"
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": folder,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "file:https",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_ALLOC_LIMIT": _GIT_MEMORY,
        }
        options = ["-c", "core.hooksPath=/dev/null", "-c", "http.followRedirects=false"]
        # Above this size an object that is no delta is never in memory as a whole; one object is unpacked at a time.
        options += ["-c", "core.bigFileThreshold=1m", "-c", "pack.threads=1"]
        _git(["git", *options, "clone", "-q", "--no-checkout", "--no-tags", *more, "--", url, str(target)], env)
        try:
            files = dict(members.files_of(commits.members(target, "HEAD", _LIMITS, env), skip_links=True))
        except ArchiveTooLarge:
            raise _too_large() from None
        except ArchiveRefused as error:
            raise _bad(f"git: {error}; a bundle needs HEAD") from None
    return _bounded(files)


def _git(argv: Sequence[str], env: dict[str, str]) -> None:
    """Run a command of git. AgentRefused."""
    try:
        done = timed_commands.run(argv, GIT_S, env=env)
    except FileNotFoundError:
        raise AgentRefused(501, "no_git", "this gateway has no git: send files or a tar") from None
    except subprocess.TimeoutExpired:
        raise _bad(f"git: the repository was not cloned within {GIT_S:g} s") from None
    if done.returncode:
        raise _bad(f"git: the clone failed: {commits.reason_of(done.stderr)}")


def _bounded(files: dict[str, bytes]) -> dict[str, bytes]:
    if reason := refused_paths(files):
        raise _bad(reason)
    if sum(map(len, files.values())) > MOST_BYTES:
        raise _too_large()
    return files


def _bad(text: str) -> AgentRefused:
    return AgentRefused(400, "invalid_workspace", text)


def _too_large() -> AgentRefused:
    text = f"a workspace holds at most {MAX_FILES} files and {MOST_BYTES} bytes; put larger ones into an image"
    return AgentRefused(413, "workspace_too_large", text)
