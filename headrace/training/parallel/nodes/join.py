"""Another node's side of the meeting: `headrace trainer join`. torch's agent starts the ranks of this machine with each
group of node 0, until that has stopped or gone; then this asks again."""

import socket
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException

from headrace.config import Config
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import Loss
from headrace.training.parallel.nodes.meeting import STORE, Guest, parted
from headrace.training.parallel.nodes.ranks import Agent

AGAIN_S = 1.0
"""Seconds between two questions."""
REMIND_S = 60.0
"""Seconds after which the same text is said again."""
CONNECT_S = 10.0
RESTARTS = 1 << 30
"""Of the agent here: the trainer's actor decides how often a group is started again."""


class Told:
    """Says a text when it is new, and again after a while."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last, self._at = say, "", 0.0

    def __call__(self, text: str) -> None:
        """Say it, if it is time."""
        if text != self._last or time.monotonic() - self._at > REMIND_S:
            self._last, self._at = text, time.monotonic()
            self._say(text)


def join(
    config: Config, node: int, address: str, say: Callable[[str], None], *, wait_s: float = 0.0, once: bool = False
) -> None:
    """Run this node's ranks for as long as a trainer wants them. address: HOST:PORT of node 0; say: gets a line about
    each change.

    wait_s: longest time without a trainer; 0: no limit. once: return when a trainer has stopped in order. TrainerError
    when this node differs from node 0, the time is over, or the address is none.
    """
    try:
        host, port = parted(address)
    except ValueError as error:
        raise TrainerError(f"the rendezvous of the trainer: {error}") from None
    told, since = Told(say), time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), CONNECT_S).close()  # the store would ask, and log, many times
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)
            stopped, why = _member(config, node, store, told)
            told(f"node {node} has left the trainer at {address}: {why}")
            if stopped and once:
                return
            since = time.monotonic()
        except SignalException:
            return  # the agent has ended its ranks
        except (OSError, dist.DistError) as error:
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            told(f"node {node} waits for the trainer at {address}: {why}")
            if wait_s and time.monotonic() - since > wait_s:
                raise TrainerError(
                    f"no trainer at {address} has taken node {node} within {wait_s:g} s: {why}"
                ) from None
        time.sleep(AGAIN_S)


def _member(config: Config, node: int, store: TCPStore, say: Callable[[str], None]) -> tuple[bool, str]:
    """Run ranks until the trainer has stopped in order (True) or gone."""
    ranks = config.trainer.machine_ranks
    meeting = Guest(store, config, node, lambda: say(f"node {node} has joined the trainer: {ranks} ranks"))

    def failed(loss: Loss) -> None:
        """A rank has ended: tell all nodes, which join the next group."""
        say(f"node {node}: {loss.text}")
        where = f"node {node} ({socket.gethostname()})"
        meeting.tell(Loss(f"{where}: {loss.text}", f"node {node}: {loss.alike or loss.text}", loss.raised))

    agent = Agent(meeting, ranks, RESTARTS, failed)
    try:
        result = agent.run()
    except dist.DistError as error:
        return False, str(error).splitlines()[0]
    return result.state is WorkerState.SUCCEEDED, "it has stopped"
