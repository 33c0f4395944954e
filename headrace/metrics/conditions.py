"""The conditions and targets that every measurement carries in its JSON line."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import headrace


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a measurement."""

    cpu: str
    cores: int
    load: float
    """Load average of the last minute."""
    python: str
    versions: dict[str, str]
    """Package to version; "absent" where it is not installed."""
    commit: str
    date: str


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A measured value beside its limit."""

    value: float | None
    """None: not measured."""
    target: float
    met: bool


def conditions(*packages: str) -> Conditions:
    """CPU, load, versions of the named packages, commit, date."""
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    return Conditions(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        versions=versions,
        commit=_commit(),
        date=time.strftime("%Y-%m-%d"),
    )


def _commit() -> str:
    package = Path(headrace.__file__).resolve().parent
    try:
        git = subprocess.run(
            ["git", "-C", str(package), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def at_least(value: float | None, target: float) -> Target:
    """A target that larger values meet. None means not measured, and the target is not met."""
    return Target(value=value, target=target, met=value is not None and value >= target)


def at_most(value: float | None, target: float) -> Target:
    """A target that smaller values meet."""
    return Target(value=value, target=target, met=value is not None and value <= target)
