"""python -m benchmarks.feature_deletion: certified tasks by feature deletion, and the processor time of all of it.

`headrace tasks make features` runs for each package, several at a time, on the process backend. The kernel counts the
processor time of every process that it starts, also of those that nobody waits for (a control group of the cpuacct
controller): the resource usage of children leaves out what a warm process forks. Every task is certified by the judge's
own examination: the known solution passes 5 of 5, no change and empty functions fail, the leak scan finds nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.conditions import at_least, at_most, cannot_run, finish
from headrace.tasks.making.journal import FILE, Journal, Line

PACKAGES = (
    "inflection==0.5.1",
    "webcolors==24.11.1",
    "w3lib==2.2.1",
    "cachetools==8.0.1",
    "semver==3.0.4",
    "ordered-set==4.1.0",
    "uritools==4.0.3",
    "isodate==0.7.2",
    "parse==1.20.2",
)
_GROUPS = Path("/sys/fs/cgroup/cpuacct")


class Made(NamedTuple):
    """The candidates and the cost of one package."""

    package: str
    lines: tuple[Line, ...]
    wall_s: float
    cpu_s: float
    output: str


def make(package: str, args: argparse.Namespace, folder: Path) -> Made:
    """Make the tasks of one package in a control group of its own."""
    name = f"features-{package.partition('==')[0]}"
    group = _GROUPS / f"headrace-{os.getpid()}-{name}"
    group.mkdir()
    words = ["tasks", "make", "features", package, "--name", name]
    words += ["--count", str(args.count), "--tries", str(args.tries), "--seed", str(args.seed)]
    settings = {"environment.backend": "process", "tasks.dir": str(folder)}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    started = time.monotonic()
    try:
        done = subprocess.run(
            ["sh", "-c", join, "sh", sys.executable, "-m", "headrace.cli", *words, *options],
            capture_output=True,
            text=True,
            timeout=args.limit_s,
            check=False,
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as expired:
        output = f"ended after {args.limit_s} s: {(expired.stdout or b'').decode()}"
    cpu = int((group / "cpuacct.usage").read_text()) / 1e9
    with suppress(OSError):  # agents of a run that was ended may still be ending
        group.rmdir()
    lines = tuple(Journal(name, folder).lines.values()) if (folder / name / FILE).exists() else ()
    made = Made(package, lines, time.monotonic() - started, cpu, output)
    tasks = sum(line.certificate is not None for line in lines)
    sys.stderr.write(f"{package}: {tasks} tasks of {len(lines)} candidates, {cpu:.0f} CPU-s, {made.wall_s:.0f} s\n")
    if not tasks:
        sys.stderr.write(f"{output[-1500:]}\n")
    return made


def main() -> None:
    """Run the benchmark and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES, metavar="NAME==VERSION")
    parser.add_argument("--count", type=int, default=9, help="tasks of each package")
    parser.add_argument("--tries", type=int, default=40, help="candidates of each package that are tried")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2, help="packages at a time")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="time limit of a package")
    parser.add_argument("--keep", type=Path, help="folder for the suites; default: a temporary one")
    args = parser.parse_args()
    if not os.access(_GROUPS / "cgroup.procs", os.W_OK):
        cannot_run(f"{_GROUPS} is not writable: the processor time of all processes cannot be counted")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.parallel) as pool:
        place = args.keep or Path(folder)
        results = list(pool.map(lambda package: make(package, args, place), args.packages))
    certificates = [line.certificate for made in results for line in made.lines if line.certificate is not None]
    mutants, killed = sum(each.mutants for each in certificates), sum(each.killed for each in certificates)
    with_tasks = sum(any(line.certificate is not None for line in made.lines) for made in results)
    cpu = sum(made.cpu_s for made in results)
    figures = {
        "benchmark": "feature_deletion",
        "tasks": len(certificates),
        "packages": with_tasks,
        "candidates": sum(len(made.lines) for made in results),
        "cpu_minutes": round(cpu / 60, 1),
        "cpu_s_a_task": round(cpu / len(certificates), 1) if certificates else None,
        "wall_s": round(max(made.wall_s for made in results)),
        "mutants": mutants,
        "mutants_killed": killed,
        "killed_share": round(killed / max(1, mutants), 3),
        "tasks_below_80_percent": sum(bool(each.notes) for each in certificates),
        "gold_runs": sum(each.gold_runs for each in certificates),
        "gold_passed": sum(each.gold_passed for each in certificates),
        "load_at_end": round(os.getloadavg()[0], 1),
        "each": {
            made.package: {
                "tasks": sum(line.certificate is not None for line in made.lines),
                "candidates": len(made.lines),
                "cpu_s": round(made.cpu_s),
                "wall_s": round(made.wall_s),
            }
            for made in results
        },
    }
    targets = {
        "tasks": at_least(len(certificates), 50),
        "packages": at_least(with_tasks, 5),
        "cpu_minutes": at_most(cpu / 60, 60),
    }
    finish(figures, targets, "pytest")


if __name__ == "__main__":
    main()
