"""Simulates the gate: measures its error rates and the number of sessions that it needs.

    python -m benchmarks.gate [--runs 10000] [--gates 1000]

Two measurements. First the harm test alone, between equal versions: 5,000 rated sessions, one test after every 50, in
both directions; a z test that is computed equally often must exceed the same error limit. Then the whole gate with its
code (`headrace.ledger.gate`): benchmark on paired tasks, canary stages, verdicts. A candidate is equal, 5 points worse
or 5 points better in both; or worse for users alone, which the benchmark cannot see. Ratings are up in 70 % of sessions
of the promoted version. Everything is drawn from a seed.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean

import msgspec
import numpy as np
from numpy.random import Generator

from benchmarks.conditions import at_least, at_most, finish
from headrace.algorithms.sequential import always_valid_p, naive_p
from headrace.config import Gate
from headrace.ledger import gate
from headrace.messages.product import Arm, GateState
from headrace.messages.rollout import PolicyRef

UP = 0.7
EVERY, LOOKS = 50, 100
RULES = Gate(tasks=1200, canary=(0.05, 0.25), sessions=100)
DISCORDANT = 0.25
"""Share of tasks that only one of two versions passes."""
PROMOTED, CANDIDATE = PolicyRef("pinned", 0), PolicyRef("pinned", 1)


def false_share(test: Callable[[int, int, int, int], float], runs: int, share: float, seed: int) -> float:
    """Share of comparisons of equal versions in which any of the tests finds a difference at 5 % in either
    direction."""
    rng, wrong = np.random.default_rng(seed), 0
    for _ in range(runs):
        treated = rng.binomial(EVERY, share, LOOKS)
        n_b, n_a = np.cumsum(treated).tolist(), np.cumsum(EVERY - treated).tolist()
        up_b, up_a = (
            np.cumsum(rng.binomial(treated, UP)).tolist(),
            np.cumsum(rng.binomial(EVERY - treated, UP)).tolist(),
        )
        for a, na, b, nb in zip(up_a, n_a, up_b, n_b, strict=True):
            if min(test(a, na, b, nb), test(b, nb, a, na)) <= 0.025:
                wrong += 1
                break
    return wrong / runs


def through(rng: Generator, better: float, live: float) -> tuple[str, float, list[int]]:
    """One candidate: its verdict, the largest share of sessions that it got, and the sessions of every stage.

    better: its advantage on tasks. live: its advantage with users.
    """
    state = gate.begin("sim", CANDIDATE, PROMOTED, RULES, 0.0, 0).state
    won, lost = rng.multinomial(
        RULES.tasks, [(DISCORDANT + better) / 2, (DISCORDANT - better) / 2, 1 - DISCORDANT]
    ).tolist()[:2]
    passes = {str(task): task < won for task in range(RULES.tasks)}
    others = {str(task): won <= task < won + lost for task in range(RULES.tasks)}
    move = gate.measured(state, passes, others, RULES, 0.0)
    assert move is not None
    state, reached, sessions = move.state, move.state.share, list[int]()
    while state.stage == "canary":
        before, count = (state.stage, state.step), 0
        while (state.stage, state.step) == before:
            state, count = _block(rng, state, live), count + EVERY
        sessions.append(count)
        reached = max(reached, state.share)
    return state.stage, reached, sessions


def _block(rng: Generator, state: GateState, live: float) -> GateState:
    """The state after `EVERY` more sessions; the gate decides after the last one."""
    treated = int(rng.binomial(EVERY - 1, state.share))
    control = EVERY - 1 - treated
    state = msgspec.structs.replace(
        state,
        treated=_plus(state.treated, treated, int(rng.binomial(treated, UP + live))),
        control=_plus(state.control, control, int(rng.binomial(control, UP))),
    )
    last = CANDIDATE if rng.random() < state.share else PROMOTED
    up = bool(rng.random() < UP + (live if last == CANDIDATE else 0.0))
    after = gate.rated(state, last, up, state.seen_seq + 1, RULES, 0.0)
    return after.state if isinstance(after, gate.Move) else after


def _plus(arm: Arm, sessions: int, up: int) -> Arm:
    return Arm(sessions=arm.sessions + sessions, up=arm.up + up)


def main() -> None:
    """Simulate and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="comparisons of equal versions")
    parser.add_argument("--gates", type=int, default=1000, help="candidates of each kind")
    args = parser.parse_args()
    started = time.monotonic()
    figures: dict[str, float] = {}
    for name, share in (("half", 0.5), ("quarter", 0.25), ("twentieth", 0.05)):
        figures[f"aa_false_{name}_share"] = false_share(always_valid_p, args.runs, share, 1)
        figures[f"aa_naive_false_{name}_share"] = false_share(naive_p, args.runs, share, 1)
    kinds = {"equal": (0.0, 0.0), "worse": (-0.05, -0.05), "better": (0.05, 0.05), "worse_for_users": (0.05, -0.2)}
    for name, (better, live) in kinds.items():
        rng = np.random.default_rng(2)
        ends = [through(rng, better, live) for _ in range(args.gates)]
        stages = Counter(end for end, _, _ in ends)
        for stage in ("held", "rolled_back", "promoted"):
            figures[f"{name}_{stage}_share"] = stages[stage] / args.gates
        figures[f"{name}_stopped_before_quarter_share"] = (
            sum(end != "promoted" and reached < 0.25 for end, reached, _ in ends) / args.gates
        )
        for step in range(len(RULES.canary)):
            needed = [sessions[step] for _, _, sessions in ends if len(sessions) > step]
            figures[f"{name}_stage_{step}_sessions"] = fmean(needed) if needed else 0.0
    figures["equal_false_share"] = figures["equal_promoted_share"] + figures["equal_rolled_back_share"]
    worst = max(figures[f"aa_false_{name}_share"] for name in ("half", "quarter", "twentieth"))
    naive = min(figures[f"aa_naive_false_{name}_share"] for name in ("half", "quarter", "twentieth"))
    targets = {
        "aa_false_share": at_most(worst, 0.05),
        "aa_naive_false_share": at_least(naive, 0.05),
        "equal_false_share": at_most(figures["equal_false_share"], 0.05),
        "worse_stopped_before_quarter_share": at_least(figures["worse_stopped_before_quarter_share"], 0.95),
        "better_promoted_share": at_least(figures["better_promoted_share"], 0.8),
    }
    finish({**figures, "seconds": time.monotonic() - started}, targets, "numpy")


if __name__ == "__main__":
    main()
