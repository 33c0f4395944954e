"""What a measurement says about its circumstances, and how targets are written down (DESIGN section 7)."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import headrace

Figures = dict[str, Any]


def conditions(*packages: str) -> Figures:
    """CPU, load, versions, commit, date."""
    names: dict[str, str] = {}
    for package in packages:
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            names[package] = "absent"
    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": names,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    house = Path(headrace.__file__).resolve().parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(house), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def at_least(value: float | None, target: float) -> Figures:
    """A target that larger values meet; None was not measured and is not met."""
    return {"value": value, "target": target, "met": value is not None and value >= target}


def at_most(value: float | None, target: float) -> Figures:
    """A target that smaller values meet."""
    return {"value": value, "target": target, "met": value is not None and value <= target}
