"""Kills `headrace up` (SIGKILL) at random moments and starts it again with the same id, until the run is finished. Then
another run follows, until there were as many kills as asked.

After every kill all processes of the run must be gone within `GONE_S`, and the audit must balance. The runs are tiny,
in the process backend, with the product lane on. One JSON line at the end; exit code 1 unless all targets are met.

    python -m benchmarks.restarts --kills 20
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from benchmarks.conditions import arguments, at_least, at_most, finish
from benchmarks.tiny_run import TINY
from headrace.parent_death import ending_with_parent

ROOT = Path(__file__).resolve().parents[1]
HEADRACE = (sys.executable, "-m", "headrace.cli")
GONE_S = 5.0
ALIVE_S = (2.0, 25.0)
"""Seconds from a start to its kill."""
MARK = "HEADRACE_RESTARTS"
LEDGER = {"duplicates": "duplicates", "issued_slots": "issued", "trained_slots": "trained"}
"""Name of a figure to that of the audit."""


def family(mark: str) -> list[int]:
    """The processes that have the run's mark in their environment."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def until_gone(mark: str, limit_s: float) -> float:
    """Seconds until no process of the run is left; `limit_s` when some still are."""
    started = time.monotonic()
    while family(mark):
        if time.monotonic() - started > limit_s:
            return limit_s
        time.sleep(0.02)
    return time.monotonic() - started


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one `headrace` command to its end."""
    return subprocess.run(
        ending_with_parent([*HEADRACE, *words]), cwd=folder, capture_output=True, text=True, check=False
    )


class RunEnd(NamedTuple):
    """One run from its first start to its end."""

    gone_s: list[float]
    """Per kill."""
    unbalanced: list[str]
    """The text of each audit that did not balance."""
    exit_code: int
    """Of the last `headrace up`."""
    ledger: dict[str, Any]
    """The audit of the finished run; empty where it does not balance."""


def until_finished(folder: Path, rng: random.Random, kills: int, steps: int) -> RunEnd:
    """Start a run, kill it at most `kills` times, and start it again until it ends by itself."""
    run = f"r{token_hex(4)}"
    settings = TINY | {"run.id": run, "curriculum.steps": steps}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    gone: list[float] = []
    unbalanced: list[str] = []
    while True:
        mark = token_hex(8)
        process = subprocess.Popen(
            ending_with_parent([*HEADRACE, "up", str(ROOT / "deploy" / "demo.toml"), *words]),
            cwd=folder,
            env=os.environ | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            _, said = process.communicate(timeout=rng.uniform(*ALIVE_S) if len(gone) < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            gone.append(until_gone(mark, 120.0))
            audit = command(folder, "audit", run)
            if audit.returncode:
                unbalanced.append(audit.stderr.strip() or audit.stdout.strip()[-300:])
            print(f"{run}: kill {len(gone)}, gone after {gone[-1]:.2f} s, audit {audit.returncode}", file=sys.stderr)
            continue
        finally:  # also after a signal: its session gets none of the terminal's
            if process.returncode is None:
                process.kill()
                process.wait()
                until_gone(mark, 120.0)
        if process.returncode:
            print(said, file=sys.stderr)
        break
    audit = command(folder, "audit", run)
    if audit.returncode:
        unbalanced.append(audit.stderr.strip() or audit.stdout.strip()[-300:])
    return RunEnd(gone, unbalanced, process.returncode, {} if audit.returncode else json.loads(audit.stdout))


def trial(folder: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """The figures of as many runs as the kills need: a fast machine finishes a run before it was killed that often."""
    rng, started = random.Random(seed), time.monotonic()
    ends: list[RunEnd] = []
    left = kills
    while left > 0:
        ends.append(until_finished(folder, rng, left, steps))
        left -= len(ends[-1].gone_s)
        if ends[-1].exit_code or len(ends) == kills:  # a run may end before its first kill
            break
    unbalanced = [text for end in ends for text in end.unbalanced]
    return {
        "kills": kills - left,
        "runs": len(ends),
        "up_exit_code": max(abs(end.exit_code) for end in ends),
        "gone_max_s": round(max((seconds for end in ends for seconds in end.gone_s), default=0.0), 2),
        "unbalanced": len(unbalanced),
        "unbalanced_first": unbalanced[:1],
        **{name: sum(end.ledger.get(key, -1) for end in ends) for name, key in LEDGER.items()},
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run the kills and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--seed", type=int, default=1)
    args = arguments(parser, kills=1, steps=2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run under way is ended, too
    with tempfile.TemporaryDirectory() as folder:
        figures = trial(Path(folder), args.kills, args.steps, args.seed)
    targets = {
        "kills": at_least(figures["kills"], args.kills),
        "gone_max_s": at_most(figures["gone_max_s"], GONE_S),
        "unbalanced": at_most(figures["unbalanced"], 0),
        "duplicates": at_most(figures["duplicates"], 0),
        "up_exit_code": at_most(figures["up_exit_code"], 0),
        "untrained_slots": at_most(figures["issued_slots"] - figures["trained_slots"], 0),
    }
    finish(figures, targets, "nats-py", "torch")
    return 0 if all(target.met for target in targets.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
