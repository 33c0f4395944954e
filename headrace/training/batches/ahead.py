"""Builds the tensors of trajectories in a thread, before the step that trains on them.

The idea: a batch of 64k tokens with routes takes longer to build than the pause between two steps may take, and its
records arrive while the step before computes its gradient. The tensors of a trajectory depend on its record alone, so
they are correct whatever happens to the state until their step: advantages, versions and staleness are taken from the
manifest's records in the step itself. A record that cannot be read gives no tensors here, and the step leaves it out.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headrace.messages.rollout import Trajectory
from headrace.training.batches.segment import BatchError, Segment, tensors_of


class Ahead:
    """The tensors of trajectories whose step has not begun, by stream sequence."""

    def __init__(self, threads: int) -> None:
        """threads: of torch, as in the thread that trains."""
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="ahead", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._building: dict[int, Future[list[Segment] | None]] = {}
        self._closed = False

    def add(self, trajectories: Mapping[int, Trajectory]) -> None:
        """Begin to build. Nothing after `close`."""
        for seq, trajectory in trajectories.items():
            if not self._closed:
                self._building[seq] = self._pool.submit(_built, trajectory)

    def take(self, sequences: Iterable[int]) -> dict[int, list[Segment]]:
        """Remove and return what was built of these sequences, when it is finished."""
        futures = {seq: self._building.pop(seq) for seq in sequences if seq in self._building}
        return {seq: built for seq, future in futures.items() if (built := future.result()) is not None}

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def _built(trajectory: Trajectory) -> list[Segment] | None:
    try:
        return tensors_of(trajectory)
    except BatchError:
        return None
