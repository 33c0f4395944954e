"""The commit that a release is built from: its hash, the check of its tag, and its time. `run` runs commands."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, cwd: Path = ROOT, **env: str) -> bytes:
    """Standard output of a command. SystemExit with its last line of output when it fails."""
    done = subprocess.run(words, cwd=cwd, env=os.environ | env, capture_output=True)
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise SystemExit(f"release: {' '.join(words[:4])} ended with code {done.returncode}: {(said or [''])[-1]}")
    return done.stdout


def resolved(name: str) -> str:
    """The full hash of a commit. It is resolved once: every part of a release comes from one commit, also when HEAD
    moves meanwhile."""
    return run("git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()


def require_tag(commit: str, version: str) -> None:
    """SystemExit when the commit is tagged as another version: wheel, image and tag have one number."""
    tags = [tag for tag in run("git", "tag", "--points-at", commit).decode().split() if re.match(r"v?\d", tag)]
    if tags and not {version, f"v{version}"} & set(tags):
        raise SystemExit(
            f"release: commit {commit[:12]} is tagged {tags[0]} and its version is {version}: set __version__ in "
            f"headrace/__init__.py, or tag it v{version}"
        )


def epoch(commit: str) -> int:
    """The time that archives carry: SOURCE_DATE_EPOCH, or that of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(given or run("git", "log", "-1", "--format=%ct", commit))
