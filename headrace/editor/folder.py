"""An editor's folder: reads its files for an agent's workspace, and writes an agent's changes into it."""

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from headrace import timed_commands
from headrace.archives import commits
from headrace.errors import HeadraceError
from headrace.gateway.agents.workspace import MOST_BYTES
from headrace.gateway.requests import MAX_FILES

SKIPPED = frozenset({".git", "node_modules", "__pycache__", ".venv"})
"""Folders that are skipped if git cannot list the project's files."""


class FolderTooLarge(HeadraceError):
    """The folder does not fit into a workspace."""


async def read_folder(folder: Path) -> dict[str, bytes]:
    """The files as path to content: those that git tracks or would track; without a repository, all outside `SKIPPED`.
    FolderTooLarge."""
    return await asyncio.to_thread(_read, folder)


def _read(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total, root = 0, folder.resolve()
    for path in _paths(folder):
        file = folder / path
        # The index may name a file below a folder that is now a symbolic link.
        if file.is_symlink() or not file.is_file() or not file.resolve().is_relative_to(root):
            continue
        total += file.stat().st_size
        if total > MOST_BYTES or len(files) == MAX_FILES:
            text = f"{folder} has more than {MAX_FILES} files or {MOST_BYTES >> 20} MiB: list the rest in .gitignore"
            raise FolderTooLarge(text)
        files[path] = file.read_bytes()
    return files


def _paths(folder: Path) -> list[str]:
    argv = commits.command(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = timed_commands.run(argv, commits.GIT_S, env=os.environ | commits.OFFLINE)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        done = None
    if done is not None and not done.returncode:
        return sorted({path for path in os.fsdecode(done.stdout).split("\0") if path})
    paths = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        paths += [(Path(root) / name).relative_to(folder).as_posix() for name in sorted(names)]
    return paths


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar of files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def write_changes(folder: Path, changed: Mapping[str, bytes], deleted: tuple[str, ...]) -> None:
    """Write an agent's changes into the folder. ValueError, before anything is written, for a path that leaves the
    folder, also through a symbolic link, and for one in a folder of git: what is written there may run."""
    root = folder.resolve()
    for path in (*changed, *deleted):
        if ".git" in path.lower().split("/"):
            raise ValueError(f"{path} is in a folder of git; no change was written")
        if not (root / path).parent.resolve().is_relative_to(root) or (root / path).is_symlink():
            raise ValueError(f"{path} is outside {folder} or a symbolic link; no change was written")
    for path in deleted:
        (root / path).unlink(missing_ok=True)
    for path, data in changed.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
