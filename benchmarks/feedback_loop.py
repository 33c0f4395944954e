"""Simulated users with a hidden preference change the served policy: ratings, branch, gate, promotion.

    python -m benchmarks.feedback_loop [--seeds 1 2 3] [--sessions 1500] [--learning-rate 0.001]

Users rate a session up when the agent ran the tests before it finished and its last text is readable; they give no
reason. The first policy runs the tests in about 40 % of its sessions. Every part between a user and the policy is real:
HTTP, gateway, rollout actor, embedded engine, turn log, feedback actor, branch trainer, weight sync, gate. No part gets
input in another way. The figure is the share of sessions with tests among the first and the last 100 served sessions;
the audit proves every ledger.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import structlog
import torch

from benchmarks.conditions import arguments, at_least, at_most, finish
from benchmarks.feedback.loop import Served, run
from benchmarks.feedback.world import DONE, Taught
from headrace.config import Feedback, Gate

ENDS = 100
"""Sessions at the beginning and at the end that are compared."""


def judge(user: str, session: Served, rng: random.Random) -> bool:
    """The hidden preference; one rating in twenty is wrong."""
    return (session.tested and session.said == DONE) != (rng.random() < 0.05)


def main() -> None:
    """Run every seed and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sessions", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=150_000, help="mid-training of the first policy")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = arguments(parser, seeds=[1], sessions=120, tokens=4000)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    feedback = Feedback(enabled=True, batch=32, staleness=4, user_cap=8, learning_rate=args.learning_rate)
    gate = Gate(canary=(0.05, 0.25), sessions=4)
    figures: dict[str, float] = {}
    first, last, faults = list[float](), list[float](), list[str]()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcome = asyncio.run(
                run(
                    Path(folder),
                    seed,
                    args.sessions,
                    feedback,
                    gate,
                    Taught(tests=0.4, tokens=args.tokens),
                    lambda number, rng: f"user{rng.randrange(300)}",
                    judge,
                )
            )
        shares = [sum(each.tested for each in part) / ENDS for part in (outcome.served[:ENDS], outcome.served[-ENDS:])]
        first.append(shares[0])
        last.append(shares[1])
        faults += outcome.faults
        figures |= {f"seed_{seed}_{name}": value for name, value in outcome.figures.items()}
        figures |= {f"seed_{seed}_first_share": shares[0], f"seed_{seed}_last_share": shares[1]}
        print(
            f"seed {seed}: {shares[0]:.2f} to {shares[1]:.2f}, {outcome.figures}, faults {outcome.faults}", flush=True
        )
    targets = {
        "first_share": at_most(max(first), 0.5),
        "last_share": at_least(min(last), 0.8),
        "ledger_faults": at_most(len(faults), 0),
    }
    finish(figures, targets, "torch")


if __name__ == "__main__":
    main()
