"""Kills `headrace up` (SIGKILL) at random moments and starts it again with the same id, until the run is finished.

After every kill all processes of the run must be gone within `GONE_S`, and the audit must balance. The run is tiny, in
the process backend, with the product lane on. One JSON line at the end; exit code 1 unless all targets are met.

    python -m benchmarks.restarts --kills 20
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks.conditions import at_least, at_most, finish
from benchmarks.tiny_run import TINY

ROOT = Path(__file__).resolve().parents[1]
HEADRACE = (sys.executable, "-m", "headrace.cli")
GONE_S = 5.0
ALIVE_S = (2.0, 25.0)
"""Seconds from a start to its kill."""
MARK = "HEADRACE_RESTARTS"


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
    return subprocess.run([*HEADRACE, *words], cwd=folder, capture_output=True, text=True, check=False)


def trial(folder: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """The figures of one run."""
    rng, run = random.Random(seed), f"r{token_hex(4)}"
    settings = TINY | {"run.id": run, "curriculum.steps": steps}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    gone: list[float] = []
    unbalanced: list[str] = []
    killed, started, code = 0, time.monotonic(), 1
    while True:
        mark = token_hex(8)
        process = subprocess.Popen(
            [*HEADRACE, "up", str(ROOT / "deploy" / "demo.toml"), *words],
            cwd=folder,
            env=os.environ | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            _, said = process.communicate(timeout=rng.uniform(*ALIVE_S) if killed < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            gone.append(until_gone(mark, 120.0))
            audit = command(folder, "audit", run)
            if audit.returncode:
                unbalanced.append(audit.stderr.strip() or audit.stdout.strip()[-300:])
            print(f"kill {killed} of {kills}: gone after {gone[-1]:.2f} s, audit {audit.returncode}", file=sys.stderr)
            continue
        code = process.returncode
        if code:
            print(said, file=sys.stderr)
        break
    audit = command(folder, "audit", run)
    ledger = json.loads(audit.stdout) if audit.returncode == 0 else {}
    return {
        "kills": killed,
        "exit_code": code,
        "gone_max_s": round(max(gone, default=0.0), 2),
        "unbalanced": len(unbalanced) + bool(audit.returncode),
        "unbalanced_first": unbalanced[:1],
        "duplicates": ledger.get("duplicates", -1),
        "issued_slots": ledger.get("issued", -1),
        "trained_slots": ledger.get("trained", -1),
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run the kills and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="steps of the run, enough to outlive the kills")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = trial(Path(folder), args.kills, args.steps, args.seed)
    targets = {
        "kills": at_least(figures["kills"], args.kills),
        "gone_max_s": at_most(figures["gone_max_s"], GONE_S),
        "unbalanced": at_most(figures["unbalanced"], 0),
        "duplicates": at_most(figures["duplicates"], 0),
        "exit_code": at_most(figures["exit_code"], 0),
    }
    finish(figures, targets, "nats-py", "torch")
    return 0 if all(target.met for target in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
