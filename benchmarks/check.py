"""Measures the processor time of `headrace check`, beside the import of torch in the same round.

    python -m benchmarks.check [CONFIG] [--rounds 5]

A round runs `headrace check CONFIG` and a Python that only imports torch, each in a process of its own, and takes their
processor time with that of their children. The figures are medians. `check` has to be done before a run would have
imported torch, so its target is a time below 2 s and a ratio below that of the import; it must not import torch,
which tests/launch/checks/test_planted.py holds. Processor time grows on a busy machine too, by shared caches and
cores: the ratio is the figure to compare.
"""

import argparse
import resource
import statistics
import subprocess
import sys

from benchmarks.conditions import at_most, cannot_run, finish


def cpu_of(*words: str) -> tuple[float, int]:
    """Processor seconds of a command with its children, and its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = done.returncode if done.stdout or not done.returncode else -1  # a traceback ends with 1, too
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, code


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="deploy/demo.toml")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    checks, imports = [], []
    for _ in range(args.rounds):
        seconds, code = cpu_of("-m", "headrace.cli", "check", args.config)
        if code not in (0, 1):
            cannot_run(f"headrace check {args.config} ended with code {code}: run it")
        checks.append(seconds)
        imports.append(cpu_of("-c", "import torch")[0])
    check, torch = statistics.median(checks), statistics.median(imports)
    figures = {
        "check_cpu_s": round(check, 3),
        "check_cpu_max_s": round(max(checks), 3),
        "import_torch_cpu_s": round(torch, 3),
        "check_over_import_torch": round(check / torch, 2),
        "rounds": args.rounds,
    }
    finish(
        figures,
        {
            "check_cpu_s": at_most(figures["check_cpu_s"], 2.0),
            "check_over_import_torch": at_most(figures["check_over_import_torch"], 1.0),
        },
        "torch",
    )


if __name__ == "__main__":
    main()
