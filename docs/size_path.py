"""Prints how many files a step and a version run through: `make size-path`.

Three steps of the tiny run record, per process and second, the file of every function that begins
(`sys.setprofile`; Python 3.11 has no `sys.monitoring`). A path counts the files of headrace that ran between the first
episode and the last step, without messages and configuration, and without the bodies of modules.

- *a request to a trained step*: curriculum, rollout, environment, judge and trainer.
- *a new version to a sampler*: sender and receiver, and weights/ and engines/ in the process of the rollout actor. The
  sampler is the embedded engine; with a server, engines/server and the server's folder run instead.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.tiny_run import settings

ROOT = Path(__file__).parents[1]
BOUNDS = ("actors/rollout/episode.py", "training/step.py")
"""A path begins in the first second of the first file and ends in the last second of the second."""
STEP = {"curriculum", "environment", "judge", "rollout", "trainer"}
VERSION = {"weight_sender", "weight_receiver"}
ASIDE = ("messages/", "config/")
_PROFILE = """
import os, sys, threading, time
package, out = {package!r}, {out!r}
if "actor" in sys.orig_argv:
    file = os.open(out + "/" + sys.orig_argv[sys.orig_argv.index("actor") + 1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = set()
    def began(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(package):
            row = (int(time.time()), code.co_filename)
            if row not in seen:
                seen.add(row)
                os.write(file, f"{{row[0]}} {{row[1][len(package):]}}\\n".encode())
    threading.setprofile(began)
    sys.setprofile(began)
"""


class Ran(NamedTuple):
    """A file of which a function began in a process within a second."""

    actors: str
    second: int
    file: str


def record(folder: Path) -> list[Ran]:
    """Run three steps of the tiny run in `folder`. Raises CalledProcessError when they fail."""
    out, site = folder / "ran", folder / "site"
    out.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(_PROFILE.format(package=f"{ROOT}/headrace/", out=str(out)))
    words = [word for entry in settings(curriculum__steps=3, production__enabled=False) for word in ("--set", entry)]
    subprocess.run(
        [sys.executable, "-m", "headrace.cli", "up", str(ROOT / "deploy" / "demo.toml"), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{site}:{ROOT}"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = []
    for process in out.iterdir():
        for line in process.read_text().splitlines():
            second, file = line.split(" ", 1)
            rows.append(Ran(process.name, int(second), file))
    return rows


def paths(rows: list[Ran]) -> dict[str, set[str]]:
    """The files of each path. Raises ValueError when no episode or no step ran."""
    first, last = ([row.second for row in rows if row.file == file] for file in BOUNDS)
    begin, end = min(first), max(last)
    step, version = set[str](), set[str]()
    for actors, second, file in rows:
        if not begin <= second <= end or file.startswith(ASIDE):
            continue
        names = set(actors.split(","))
        if names & STEP:
            step.add(file)
        if names & VERSION or ("rollout" in names and file.startswith(("weights/", "engines/"))):
            version.add(file)
    return {"a request to a trained step": step, "a new version to a sampler": version}


def main() -> None:
    """Print a line per path, and one per folder of it."""
    with tempfile.TemporaryDirectory() as folder:
        found = paths(record(Path(folder)))
    for name, files in found.items():
        sys.stdout.write(f"{name}: {len(files)} files\n")
        for part, count in Counter(file.split("/")[0] for file in files).most_common():
            sys.stdout.write(f"  {part:12} {count:4}\n")


if __name__ == "__main__":
    main()
