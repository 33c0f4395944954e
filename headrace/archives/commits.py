"""Commits of git: their files are listed within limits and read as objects. Nothing is checked out.

A bundle of a few kilobytes may hold a tree that names one object ten times on each of ten levels, which is ten billion
files or empty folders; so the listing shows folders too and ends at the limit. A checkout would also run what the
repository's attributes ask for.

A repository's own configuration may name programs: one that verifies signatures, one that watches files, one that
fetches missing objects. Use `command` and `OFFLINE` for every git that reads a repository somebody else may have
written.
"""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace import timed_commands
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, Member

GIT_S = 120.0
_LINE = 1 << 14
OFFLINE = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_REPLACE_OBJECTS": "1"}
"""Variables for a git that connects to nothing. A repository may call a remote, or a program, the place of its missing
objects; git then asks there for each object that it lacks."""
NO_REPOSITORY = "/dev/null/none"
"""As GIT_DIR: git works on plain files and looks for no repository around them."""
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false")


def command(repository: Path, *arguments: str) -> list[str]:
    """A git command in a repository that does not run the programs which the repository's configuration names. It needs
    the variables `OFFLINE` too."""
    return ["git", *(word for setting in _SETTINGS for word in ("-c", setting)), "-C", str(repository), *arguments]


def environment() -> dict[str, str]:
    """Variables for a git that reads nothing but the repository that it is shown, and connects to nothing."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return environment | OFFLINE | {"GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}


def members(repository: Path, commit: str, limits: ArchiveLimits, env: Mapping[str, str]) -> list[Member]:
    """The files, links and submodules of a commit, links and submodules without content. env: of git's processes;
    `OFFLINE` is added.

    ArchiveRefused, ArchiveTooLarge; FileNotFoundError without git."""
    env = {**env, **OFFLINE}
    listed: list[tuple[str, str, str]] = []
    files = size = 0
    for number, (mode, id, length, name) in enumerate(_listed(repository, commit, env), 1):
        if not mode.startswith("04"):
            listed.append((mode, id, name))
            files, size = files + 1, size + length
        limits.check(number, files, size)
    contents = _contents(repository, [id for mode, id, _ in listed if not mode.startswith("16")], env)
    return [_member(mode, name, b"" if mode.startswith("16") else next(contents)) for mode, _, name in listed]


def _member(mode: str, name: str, data: bytes) -> Member:
    if mode.startswith("100"):
        return Member(name, data, "program" if mode == "100755" else "file")
    if mode.startswith("12"):
        return Member(name, None, "link", os.fsdecode(data))
    return Member(name, None, "submodule")


def reason_of(output: bytes) -> str:
    """The first fatal error that git wrote, or else its last line."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("fatal:")]
    return (fatal or lines[-1:] or ["git gave no reason"])[0][:300]


def _listed(repository: Path, commit: str, env: Mapping[str, str]) -> Iterator[tuple[str, str, int, str]]:
    """Mode, object id, size in bytes (0 for a folder) and name of each entry."""
    argv = command(repository, "ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit)
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as git:
        assert git.stdout is not None and git.stderr is not None
        late = threading.Timer(GIT_S, git.kill)
        late.start()
        try:
            rest = b""
            while piece := os.read(git.stdout.fileno(), _LINE):
                *lines, rest = (rest + piece).split(b"\0")
                for line in lines:
                    about, _, name = line.partition(b"\t")
                    mode, _, id, length = about.decode().split()
                    path = name.decode("utf-8", "surrogateescape")
                    yield mode, id, int(length) if length.isdigit() else 0, path
                if len(rest) > _LINE:
                    raise ArchiveTooLarge(f"it has a path of more than {_LINE >> 10} KiB")
            reason = reason_of(git.stderr.read(_LINE))
            git.wait()
        finally:
            late.cancel()
            git.kill()
    if git.returncode:
        raise ArchiveRefused(f"it has no commit {commit} that git can read within {GIT_S:g} s: {reason}")


def _contents(repository: Path, ids: list[str], env: Mapping[str, str]) -> Iterator[bytes]:
    """The contents of objects. Their sizes are known, so that all of them fit."""
    argv = command(repository, "cat-file", "--batch")
    try:
        done = timed_commands.run(argv, GIT_S, env=env, data="\n".join(ids).encode())
    except subprocess.TimeoutExpired:
        raise ArchiveRefused(f"git did not read its files within {GIT_S:g} s") from None
    at = 0
    for id in ids:
        end = done.stdout.find(b"\n", at)
        words = done.stdout[at:end].split()
        if end < 0 or len(words) != 3 or len(done.stdout) < end + 1 + int(words[2]):
            raise ArchiveRefused(f"git cannot read its object {id}: {reason_of(done.stderr)}")
        at = end + 1 + int(words[2]) + 1
        yield done.stdout[end + 1 : at - 1]
