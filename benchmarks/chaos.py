"""Injects faults into every part of a run, and kills `headrace up` (SIGKILL): `make chaos` (docs/chaos.md).

    python -m benchmarks.chaos [--kills 150] [--others 30] [--restarts 20]

Three parts, one after another: kill -9 of every process, of the broker and of microVMs; SIGSTOP and cut connections;
`headrace up` killed and started again. A part that ended well is kept in `--folder`, so a measurement that was
interrupted continues with the next part; `--again` measures all of them. The last line is JSON with the three reports
and goes to `--out`; the command exits 1 unless all targets of all parts are met. Ctrl-C, or a signal that ends a part,
ends the command with code 130.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import arguments, at_most, finish, scratch
from headrace.parent_death import ending_with_parent

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "deploy" / "chaos.toml"
INTERRUPTED = 130
ENDED_BY_SIGNAL = (INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a part."""
END_S = 40.0
"""Seconds for a part to end in order after a signal; it is killed then."""
CHAOS = (sys.executable, "-m", "headrace.cli", "chaos")


def parts(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Name to command."""
    chaos = (*CHAOS, str(args.config), *(word for change in args.set for word in ("--set", change)))
    kills = (*chaos, "--kills", str(args.kills), "--faults", "kill", "--minutes", "25", "--seed", str(args.seed))
    others = (*chaos, "--kills", str(args.others), "--faults", "stop", "cut", "--minutes", "10")
    restarts = (sys.executable, "-m", "benchmarks.restarts", "--kills", str(args.restarts))
    restarting = (*restarts, "--steps", str(args.restart_steps), "--seed", str(args.seed))
    if args.smoke:
        return {"restarts": (*restarts, "--smoke")}
    return {
        "kills": kills,
        "stops_and_cuts": (*others, "--seed", str(args.seed)),
        "restarts": restarting,
    }


def end(process: "subprocess.Popen[str]") -> None:
    """End a part: in order, and by SIGKILL when that takes too long. Popen itself leaves a child behind on Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=END_S)  # it may still write
    except subprocess.TimeoutExpired:
        pass
    finally:  # also at a second Ctrl-C
        process.kill()
        process.wait()


def measure(command: tuple[str, ...]) -> dict[str, Any]:
    """The JSON line with which a command ends, and its exit code. Its other lines go to standard error."""
    last, started = "", time.monotonic()
    with subprocess.Popen(
        ending_with_parent(command),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line
                if not line.startswith("{"):
                    print(line, end="", file=sys.stderr, flush=True)
            code = process.wait()
        finally:
            end(process)
    report = json.loads(last) if last.startswith("{") else {}
    return {**report, "exit_code": code, "minutes": round((time.monotonic() - started) / 60, 1)}


def main() -> int:
    """The parts and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=150, help="kill -9 of processes, broker and machines")
    parser.add_argument("--others", type=int, default=30, help="SIGSTOP and cut connections")
    parser.add_argument("--restarts", type=int, default=20, help="kill -9 of `headrace up`")
    parser.add_argument("--restart-steps", type=int, default=60, help="steps of each run that is started again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "chaos")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "chaos.json")
    parser.add_argument("--again", action="store_true", help="measure the parts again that an earlier call finished")
    args = arguments(parser, folder=Path(scratch()), again=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part under way is ended, too
    args.folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, Any] = {}
    for name, command in parts(args).items():
        part_file = args.folder / f"{name}.json"
        earlier = json.loads(part_file.read_text()) if part_file.exists() and not args.again else {}
        if earlier.get("command") == list(command[1:]):
            print(f"{name}: kept from {part_file}", file=sys.stderr)
            reports[name] = earlier["report"]
            continue
        reports[name] = measure(command)
        if reports[name]["exit_code"] in ENDED_BY_SIGNAL:
            print(f"interrupted in {name}; the finished parts stay in {args.folder}", file=sys.stderr)
            return INTERRUPTED
        if reports[name]["exit_code"] == 0:
            part_file.write_text(json.dumps({"command": command[1:], "report": reports[name]}))
    met = all(report["exit_code"] == 0 for report in reports.values())
    ended = {name: at_most(report["exit_code"], 0) for name, report in reports.items()}
    results = finish({**reports, "met": met}, ended, "nats-py", "torch")
    if not args.smoke:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    for part_file in args.folder.glob("*.json") if met else ():
        part_file.unlink()
    return 0 if met else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
