"""Seconds from a user's thumb to the outcome that waits for the trainer, over HTTP and the whole product.

    python -m benchmarks.thumb_latency [--thumbs 1040] [--rate 4]

A small product with real parts (`benchmarks.feedback.world`), its branch's trainer switched off so that outcomes only
queue. First every user holds one session of one token. Then the thumbs arrive at random (Poisson) at `--rate` a second;
each is one POST to the gateway, which ends the session, has its trajectory stored and stores the rating. The feedback
actor closes a batch for every 16 ratings. The outcome is the GroupClosed in HR_SCORE from which the branch's trainer
reads. `queued` runs to it from the moment before the POST of the batch's last thumb: before that a batch waits for
other users, as `[feedback] batch` says. `filled` runs from the moment before the thumb's own POST and includes that
wait; `answer` runs to the gateway's answer. The audit then proves that every rating has one end.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import structlog
import torch

from benchmarks.conditions import Figures, at_least, at_most, finish
from benchmarks.feedback.world import RUN, Product, Taught, Users, ask, configuration, product
from headrace.config import Feedback, Gate
from headrace.messages.ledger import GroupClosed
from headrace.messages.subjects import CLOSE
from headrace.replay.audit import prove

BATCH, STALENESS = 16, 64
MOST = BATCH * (STALENESS + 1)
"""The promoted version stays, so batches after this many ratings would wait for a newer one."""
AT_ONCE = 16


async def sessions(running: Product, users: Users, count: int) -> list[str]:
    """One session of one token for each user; their names."""
    names: list[str] = []
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            names.append(await users.short_session(f"user{number}", ask(number)))

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    running.check()
    return names


async def measure(folder: Path, thumbs: int, rate: float) -> Figures:
    """All thumbs of one product."""
    taught = Taught(tokens=4000)
    feedback = Feedback(enabled=True, batch=BATCH, staleness=STALENESS)
    config = configuration(folder, 1, feedback, Gate(canary=(0.25,), sessions=1000), taught)
    closed: dict[str, float] = {}
    sent: dict[str, float] = {}
    answered: list[float] = []
    rng = random.Random(1)
    async with product(folder, config, taught) as running, Users.of(running) as users:
        await running.end(running.branch, "trainer")
        names = await sessions(running, users, thumbs)
        everyone = asyncio.Event()

        async def watch() -> None:
            async for received in running.bus.follow("HR_SCORE", CLOSE.where(run=running.branch)):
                if isinstance(received.message, GroupClosed):
                    closed[received.message.group] = time.perf_counter()
                    if len(closed) == thumbs:
                        everyone.set()

        async def thumb(name: str) -> None:
            sent[name] = time.perf_counter()
            await users.rate(name, rng.random() < 0.7)
            answered.append(time.perf_counter() - sent[name])

        watching = asyncio.create_task(watch())
        began, at, posts = time.perf_counter(), 0.0, list[asyncio.Task[None]]()
        for name in names:
            at += rng.expovariate(rate)
            await asyncio.sleep(began + at - time.perf_counter())
            posts.append(asyncio.create_task(thumb(name)))
        await asyncio.gather(*posts)
        took = time.perf_counter() - began
        async with asyncio.timeout(120):
            await everyone.wait()
        watching.cancel()
        running.check()
        report, faults = await prove(running.bus, RUN)
        assert report.feedback is not None
    order = sorted(names, key=closed.__getitem__)
    batches = [order[at : at + BATCH] for at in range(0, thumbs, BATCH)]
    queued = [closed[name] - max(map(sent.__getitem__, batch)) for batch in batches for name in batch]
    filled = [closed[name] - sent[name] for name in names]
    return {
        "thumbs": len(queued),
        "rate_per_s": round(thumbs / took, 2),
        "batch": BATCH,
        **{f"answer_p{p}_s": round(float(np.percentile(answered, p)), 4) for p in (50, 99)},
        **{f"queued_p{p}_s": round(float(np.percentile(queued, p)), 4) for p in (50, 99)},
        **{f"filled_p{p}_s": round(float(np.percentile(filled, p)), 4) for p in (50, 99)},
        "queued_max_s": round(max(queued), 4),
        "received": report.feedback.received,
        "pending": report.feedback.ends["pending"],
        "ledger_faults": len(faults),
    }


def main() -> None:
    """Run the benchmark and print one line of JSON."""
    parser = argparse.ArgumentParser(description="seconds from a thumb to the outcome that waits for the trainer")
    parser.add_argument("--thumbs", type=int, default=MOST, help=f"whole batches of {BATCH}, at most {MOST}")
    parser.add_argument("--rate", type=float, default=4.0, help="thumbs a second")
    args = parser.parse_args()
    if args.thumbs % BATCH or not 0 < args.thumbs <= MOST:
        parser.error(f"--thumbs: expected a multiple of {BATCH} from {BATCH} to {MOST}, got {args.thumbs}")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), args.thumbs, args.rate))
    targets = {
        "thumbs": at_least(figures["thumbs"], 1000),
        "queued_p99_s": at_most(figures["queued_p99_s"], 2.0),
        "ledger_faults": at_most(figures["ledger_faults"], 0),
    }
    finish(figures, targets, "torch")


if __name__ == "__main__":
    main()
