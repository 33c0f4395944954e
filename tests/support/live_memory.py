"""Bytes of torch's CPU allocator in a trainer's steps, phase by phase; and batches of long records.

Run as a program it is a rank of a trainer's group: `python -m tests.support.live_memory`, with the port of the
group's store and a `Hello` as its first line of input. It prints its phases as JSON.
"""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.config import Config
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import BatchGroup, StepManifest
from headrace.policy.layout import hugging_face
from headrace.training.memory_plan import MemoryPlan
from headrace.training.parallel import group
from headrace.training.parallel.nodes.ranks import Hello
from headrace.training.parallel.opening import joined
from headrace.training.trainer import PolicyTrainer
from tests.support import world
from tests.support.rank_processes import keys

MARK = "phase: "
PHASES = ("rescore", "backward", "update")

Records = tuple[StepManifest, dict[int, Trajectory], dict[int, Score]]


_ALL_THREADS = ctypes.c_bool.in_dll(
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_report_cpu_memory_usage"
)
"""With it the allocator counts the bytes of all threads: gloo's threads free tensors unseen by the profiler."""


def mark(name: str) -> None:
    """A phase begins here."""
    with record_function(f"{MARK}{name}"):
        pass


class Watch:
    """Live bytes since `watched` began; when it is over `peaks` has the largest of each phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}


@contextmanager
def watched() -> Iterator[Watch]:
    """Count what torch's CPU allocator holds beyond what it held before; a phase ends where the next one begins."""
    watch = Watch()
    _ALL_THREADS.value = True
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            first = torch.empty(64)
            yield watch
            del first
    finally:
        _ALL_THREADS.value = False
    assert seen.profiler is not None
    events = list(_events(seen.profiler.kineto_results.experimental_event_tree()))
    before, live, phase = 0, -1, ""
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name.startswith(MARK):
            phase = event.name.removeprefix(MARK)
            watch.peaks[phase] = live
        elif event.name == "[memory]":
            if live < 0:
                before = event.extra_fields.total_allocated - event.extra_fields.alloc_size
            live = event.extra_fields.total_allocated - before
            if phase:
                watch.peaks[phase] = max(watch.peaks[phase], live)


def _events(tree: Any) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)


def live_bytes(work: Callable[[], object]) -> int:
    """The most bytes that the allocator holds at once, above those before."""
    with watched() as watch:
        mark("before")
        mark("work")
        work()
    return watch.peaks["work"] - watch.peaks["before"]


class Hooks:
    """Marks the phases of a step: re-scoring, the gradient, the update."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def before_forward(self) -> None:
        """The first call comes before re-scoring, the second before the first forward pass of the gradient."""
        if self.calls < 2:
            mark(f"{self.number} {PHASES[self.calls]}")
        self.calls += 1

    def before_update(self) -> None:
        """Called first when the gradient is computed."""
        if self.calls < 1000:
            self.calls = 1000
            mark(f"{self.number} update")


class Here(ThreadPoolExecutor):
    """Does work at once, in the caller's thread: the profiler does not see what other threads free."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def planned(told: MemoryPlan) -> dict[str, int]:
    """The plan's phases by their names here."""
    return {"rescore": told.rescoring, "backward": told.training, "update": told.updating}


def records(config: Config, version: int, length: int) -> Records:
    """A batch of records with `length` inputs each, all but 16 of them forwarded by the version before."""
    policy = hugging_face.of_run(config)
    size, groups = config.curriculum.group_size, config.curriculum.groups_per_step
    trajectories, scores, closed = {}, {}, []
    for number in range(groups):
        name = f"g{version}x{number}"
        for slot in range(size):
            seq = number * size + slot + 1
            draw = torch.Generator().manual_seed(version * 1000 + seq)
            ids = torch.randint(10, 300, (length + 1,), generator=draw)
            rows = torch.rand(length, policy.sparse_layers, max(1, policy.experts), generator=draw).argsort(-1)
            routed = rows[..., : policy.top_k].to(torch.uint8)
            older, drawn = max(0, version - 1), length - 16
            trajectories[seq] = Trajectory(
                run="r", lane="train", group=name, slot=slot, attempt=0, id=f"{name}-{slot}-0",
                task=TaskRef("even", "1"), family="even", seed=seq, policy=PolicyRef(), sampling=Sampling(),
                outcome="finished", diff={}, fingerprint=world.NUMERICS.fingerprint,
                turns=(
                    Turn(
                        index=0, segment=0, prompt_ids=Array.of(ids[:-drawn].tolist(), "<i4"),
                        ids=Array.of(ids[-drawn:].tolist(), "<i4"), logprobs=Array.of([-5.8] * drawn, "<f4"),
                        routed=Array("|u1", tuple(routed.shape), routed.numpy().tobytes()) if policy.experts else None,
                        spans=(Span(0, drawn, older), Span(drawn, length, version)),
                    ),
                ),
            )  # fmt: skip
            scores[1000 + seq] = msgspec.structs.replace(world.score(trajectories[seq]), reward=float(slot % 2))
        slots = tuple((number * size + at + 1, 1001 + number * size + at) for at in range(size))
        closed.append(BatchGroup(group=name, close_seq=number + 1, slots=slots))
    manifest = StepManifest(
        run="r", step=version, version=version, base_hash="", groups=tuple(closed), seed=version, code="test",
        fingerprint=world.NUMERICS.fingerprint,
    )  # fmt: skip
    return manifest, trajectories, scores


def steps(trainer: PolicyTrainer, count: int, length: int) -> None:
    """Take steps, with their phases marked."""
    trainer._beside = Here(1)
    for number in range(count):
        hooks = Hooks(number)
        outcome = trainer.step(
            *records(trainer.config, number, length), hooks.before_update, False, hooks.before_forward
        )
        assert not outcome.failed, f"{outcome.failed} {outcome.detail}"


def rank(hello: Hello, number: int, store: PrefixStore, work: Callable[[Any], None] | None = None) -> Watch:
    """Be a rank until the first process sends `stop`, or do the first one's `work`."""
    with watched() as watch:
        trainer = joined(hello.config, Path(hello.folder), number, store)
        if work is not None:
            work(trainer)
        else:
            taken, step = 0, trainer.step
            trainer._beside = Here(1)

            def marked(*arguments: Any, hashed: bool = True) -> Any:
                nonlocal taken
                hooks = Hooks(taken)
                taken += 1
                manifest, trajectories, scores = arguments
                return step(manifest, trajectories, scores, hooks.before_update, hashed, hooks.before_forward)

            trainer.step = marked  # type: ignore[method-assign, assignment]
            trainer.obey()
    del trainer
    gc.collect()
    return watch


def main() -> None:
    """A rank other than the first."""
    hello = msgspec.json.decode(sys.stdin.buffer.readline(), type=Hello)
    watch = rank(hello, 1, keys(int(sys.argv[1])))
    print(json.dumps(watch.peaks), flush=True)
    group.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
