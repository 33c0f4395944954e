"""Trains the demo's policy for a few steps with a real SGLang server as the sampler, then with the embedded engine.

    python -m benchmarks.demo_sglang [--config deploy/demo-sglang.toml] [--dir runs] [--kill]

Two whole runs of `headrace up` on one configuration; each one's own report.json is the source of its figures. The
trainer scores every sampled token again: k1, k3 and the largest difference measure the mismatch of sampler and trainer,
`flips` is the share of (position, layer) pairs for which the trainer would have chosen other experts. --kill: the
server is killed (SIGKILL) during training, and the audit must balance all the same.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import tiny_run
from benchmarks.conditions import Figures, arguments, at_least, at_most, cannot_run, finish, scratch, smoke
from headrace.config import load
from headrace.parent_death import ending_with_parent

EMBEDDED = ("engine.kind=embedded", "engine.options={}")
SAID = ("steps", "episodes", "rescored_tokens", "max_abs_dlp", "heldout_tasks", "heldout_before", "heldout_after_t1",
        "heldout_after_greedy", "wall_s")  # fmt: skip
KEPT = ("k1", "k3", "max_abs_dlp", "differ", "flips", "tokens")
TRAINS = "| step "
"""Pattern of a progress line after at least one step."""


def servers(run: str) -> list[int]:
    """Process groups of SGLang servers that serve this run's staged folder."""
    groups = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"sglang.launch_server" in words and any(f"headrace-{run}-".encode() in word for word in words):
                groups.append(os.getpgid(int(entry.name)))
    return sorted(set(groups))


def killed(run: str) -> bool:
    """SIGKILL for the run's server with all its processes; False when there is none."""
    groups = servers(run)
    for group in groups:
        os.killpg(group, signal.SIGKILL)
    return bool(groups)


def trained(config: str, folder: str, changes: tuple[str, ...], on_step: Callable[[str], bool]) -> dict[str, Any]:
    """One run and its report. on_step(run): called with every line of a training run until it returns True."""
    run = f"demo-{'embedded' if changes else 'sglang'}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "headrace.cli", "up", config]
    for entry in (
        f"run.dir={folder}",
        f"run.id={run}",
        *changes,
        *(tiny_run.settings(curriculum__steps=1) if smoke() else ()),
    ):
        command += ["--set", entry]
    done = False
    with subprocess.Popen(ending_with_parent(command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            done = done or (TRAINS in line and on_step(run))
    if process.returncode == 3:
        cannot_run("this machine can't run microVMs; `headrace check` says why")
    if process.returncode:
        sys.exit(f"the run of {run} ended with code {process.returncode}")
    report: dict[str, Any] = json.loads((Path(folder) / run / "report.json").read_text())
    return report


def main() -> None:
    """Both runs, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_sglang")
    parser.add_argument("--config", default="deploy/demo-sglang.toml")
    parser.add_argument("--dir", default="runs")
    parser.add_argument("--kill", action="store_true")
    args = arguments(parser, dir=scratch())
    python = load(args.config).engine.options.get("python")
    if not Path(str(python)).exists():
        cannot_run(f"{python} is not there; `make test-sglang` builds the server's environment")
    figures: Figures = {"config": args.config}
    reports: dict[str, dict[str, Any]] = {}
    kills: list[str] = []

    def once(run: str) -> bool:
        if killed(run):
            kills.append(run)
        return bool(kills)

    reports["sglang"] = trained(args.config, args.dir, (), once if args.kill else lambda run: True)
    reports["embedded"] = trained(args.config, args.dir, EMBEDDED, lambda run: True)
    figures["server_kills"] = len(kills)
    for name, report in reports.items():
        figures |= {f"{name}_{key}": report[key] for key in SAID}
        figures[f"{name}_balanced"] = report["ledger"]["balanced"]
        figures[f"{name}_attempts"] = report["ledger"]["attempts"]
        for engine in report["engines"]:
            figures |= {f"{name}_{key}": engine[key] for key in KEPT}
    ledgers = [report["ledger"] for report in reports.values()]
    targets = {
        "books_balanced": at_least(float(all(ledger["balanced"] for ledger in ledgers)), 1.0),
        "staleness_over_bound": at_most(
            max(ledger["staleness_max"] - ledger["staleness_bound"] for ledger in ledgers), 0
        ),
    }
    if args.kill:
        targets["server_killed_and_started_again"] = at_least(figures["server_kills"], 1)
    finish(figures, targets, "torch", "aiohttp")


if __name__ == "__main__":
    main()
