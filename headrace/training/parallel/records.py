"""Sends the trajectories of later steps to the other processes, while a step computes its gradient.

The idea: the order to take a step would otherwise carry them, and between two steps every process would wait until they
are sent, read and made into tensors. So the first process sends them over a connection of their own as soon as it has
them, and the order names their sequences. A thread of each other process receives them and builds their tensors.
"""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from headrace.messages.rollout import Trajectory
from headrace.training.batches.ahead import Ahead
from headrace.training.parallel.group import PeerGroup


class RankRecords:
    """The trajectories that were sent ahead of their step, by stream sequence."""

    def __init__(self, aside: PeerGroup, ahead: Ahead) -> None:
        """aside: a connection that no other thread uses; ahead: of this process."""
        self._aside, self._ahead = aside, ahead
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._sent: dict[int, Future[None]] = {}
        self._closed = False
        self._here: dict[int, Trajectory] = {}
        self._arrived = threading.Condition()
        self._error: BaseException | None = None
        self._receiving = threading.Thread(target=self._receive, name="records", daemon=True)

    def send(self, trajectories: Mapping[int, Trajectory]) -> None:
        """In the first process: begin to send. Nothing after `close`."""
        if not self._closed:
            self._sent.update(dict.fromkeys(trajectories, self._submit(trajectories)))

    def _submit(self, trajectories: Mapping[int, Trajectory]) -> "Future[None]":
        def work() -> None:
            self._aside.shared(msgspec.msgpack.encode(trajectories))

        return self._sending.submit(work)

    def sent(self, sequences: Iterable[int]) -> list[int]:
        """In the first process: the sequences among these that were sent, when the others have them. RuntimeError when
        another process has ended."""
        sent = {seq: self._sent.pop(seq) for seq in sequences if seq in self._sent}
        for future in set(sent.values()):
            future.result()
        return list(sent)

    def close(self) -> None:
        """In the first process: end the threads of all processes that still run."""
        if not self._closed:
            self._closed = True
            self._submit({})
            self._sending.shutdown(wait=True)

    def listen(self) -> None:
        """In every other process: receive from now on, in a thread."""
        self._receiving.start()

    def ended(self) -> None:
        """In every other process: return when the first one has closed its end."""
        self._receiving.join()

    def take(self, sequences: Iterable[int]) -> dict[int, Trajectory]:
        """In every other process: remove and return these trajectories, when all have arrived. RuntimeError when they
        cannot arrive any more."""
        wanted = list(sequences)
        with self._arrived:
            self._arrived.wait_for(lambda: self._error is not None or self._here.keys() >= set(wanted))
            if self._error is not None:
                raise RuntimeError(f"no records arrive any more: {self._error}") from self._error
            return {seq: self._here.pop(seq) for seq in wanted}

    def _receive(self) -> None:
        try:
            while trajectories := msgspec.msgpack.decode(self._aside.shared(), type=dict[int, Trajectory]):
                self._ahead.add(trajectories)
                with self._arrived:
                    self._here.update(trajectories)
                    self._arrived.notify_all()
        except BaseException as error:
            with self._arrived:
                self._error = error
                self._arrived.notify_all()
