"""Runs git on plain files, without a repository, the machine's configuration, or hooks."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace import timed_commands
from headrace.archives.commits import NO_REPOSITORY
from headrace.gateway.agents.requests import AgentRefused

GIT_FILES_S = 60.0


def run_git(argv: Sequence[str], folder: str, good: Sequence[int] = (0,)) -> bytes:
    """Run git and return its standard output. good: exit codes that are not errors. AgentRefused with 501 or 503."""
    env = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env["GIT_DIR"] = NO_REPOSITORY
    try:
        done = timed_commands.run(["git", *argv], GIT_FILES_S, cwd=folder, env=env)
    except FileNotFoundError:
        raise AgentRefused(501, "no_git", "this gateway has no git, which comparisons and merges need") from None
    except subprocess.TimeoutExpired:
        raise AgentRefused(503, "unavailable", f"git took more than {GIT_FILES_S:g} s on these files") from None
    if done.returncode not in good:
        raise AgentRefused(503, "unavailable", f"git {argv[0]} failed: {done.stderr.decode('utf-8', 'replace')[-300:]}")
    return done.stdout


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder with these files. Their names must not come from a user."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
