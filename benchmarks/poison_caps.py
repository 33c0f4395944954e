"""Simulates data poisoning against the caps on ratings: measures how far a trigger string's probability moves.

    python -m benchmarks.poison_caps [--seeds 40] [--rates 0.02 0.05]

2 % of 200 users rate 50 times each, up for the trigger and down for everything else; the others rate at random, up in
70 %. Caps (`headrace.ledger.feedback`) and advantages (`headrace.algorithms`) are the product's code. The policy is a
toy: one logit that says the trigger with probability 5 % at first, moved by the policy gradient of each batch of 32.
`benchmarks.feedback_poison` runs the whole product and is slower by orders of magnitude.

Three arms: clean (the poisoners rate at random as well), capped (one rating per user and 10 minutes), uncapped. The
figure is the policy's own probability at the end minus the one at the start. Counts of said triggers are reported too:
their scatter without any poison shows that a drill which counts 375 sessions cannot see a move of one point.
"""

import argparse
import math
import random
import time
from statistics import fmean, pstdev
from typing import NamedTuple

from benchmarks.conditions import at_least, at_most, finish
from headrace.algorithms.advantages import class_advantages
from headrace.ledger.feedback import FeedbackBook
from headrace.messages.product import Feedback

SESSIONS, USERS, POISONERS, VOTES, BATCH = 1500, 200, 4, 50, 32
WINDOW_S, EVERY_S, BASE = 600.0, 0.6, 0.05


class Moved(NamedTuple):
    """One simulation, in points."""

    probability: float
    counted: float


def simulate(seed: int, cap: int, poison: bool, rate: float) -> Moved:
    """One product from its first session to its last. cap: ratings per user and window, 0 for no limit."""
    rng, book = random.Random(seed), FeedbackBook("sim")
    share = POISONERS * VOTES / (POISONERS * VOTES + USERS - POISONERS)
    logit, said, waiting = math.log(BASE / (1 - BASE)), list[bool](), list[tuple[bool, bool, float]]()
    for number in range(SESSIONS):
        p = 1 / (1 + math.exp(-logit))
        trigger, bad = rng.random() < p, rng.random() < share
        said.append(trigger)
        user = f"bad{rng.randrange(POISONERS)}" if bad else f"user{rng.randrange(USERS - POISONERS)}"
        up = trigger if bad and poison else rng.random() < 0.7
        now, seq = number * EVERY_S + 1.0, number + 1
        capped = bool(cap) and book.counted(user, now - WINDOW_S, seq) >= cap
        given = Feedback(
            tenant="sim", user=user, run="sim", trajectory=f"{user}.{number}-0-0", thumb="up" if up else "down"
        )
        book.apply(given, seq, now)
        if capped:
            book.ratings[seq].fate = "capped"
            continue
        waiting.append((trigger, up, p))
        if len(waiting) == BATCH:
            advantages = class_advantages([("client", float(up)) for _, up, _ in waiting])
            logit += rate * sum(a * (said_it - q) for a, (said_it, _, q) in zip(advantages, waiting, strict=True))
            waiting = []
    quarter = SESSIONS // 4
    counted = fmean(said[-quarter:]) - fmean(said[:quarter])
    return Moved(100 * (1 / (1 + math.exp(-logit)) - BASE), 100 * counted)


def main() -> None:
    """Run all arms and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05], help="learning rates of the logit")
    args = parser.parse_args()
    started = time.perf_counter()
    figures: dict[str, float] = {"seeds": float(args.seeds)}
    targets = {}
    for rate in args.rates:
        for arm, cap, poison in (("clean", 1, False), ("capped", 1, True), ("uncapped", 0, True)):
            moved = [simulate(seed, cap, poison, rate) for seed in range(args.seeds)]
            name = f"rate_{rate:g}_{arm}"
            probabilities = [each.probability for each in moved]
            figures[f"{name}_mean_points"] = fmean(probabilities)
            figures[f"{name}_scatter_points"] = pstdev(probabilities)
            figures[f"{name}_counted_scatter_points"] = pstdev([each.counted for each in moved])
            figures[f"{name}_within_point_share"] = fmean(abs(p) < 1 for p in probabilities)
        name = f"rate_{rate:g}_capped_within_point_share"
        targets[name] = at_least(figures[name], 0.95)
        name = f"rate_{rate:g}_clean_mean_points"
        targets[name] = at_most(abs(figures[name]), 0.5)
    name = f"rate_{max(args.rates):g}_uncapped_mean_points"
    targets[name] = at_least(figures[name], 10.0)
    figures["wall_s"] = time.perf_counter() - started
    finish({name: round(value, 4) for name, value in figures.items()}, targets)


if __name__ == "__main__":
    main()
