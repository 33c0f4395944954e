"""Starts the other processes of a trainer's group and ends them with the first process.

Those of this machine are its children (`nodes.local`); other machines come to the rendezvous and start theirs
(`nodes.rendezvous`). When one of them ends, a thread kills the rest: the collective in which the first process waits
then raises an error.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.config import Config
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.nodes import wire
from headrace.training.parallel.nodes.local import STOP_S, Ending, Hello, LocalRanks, Store
from headrace.training.parallel.nodes.rendezvous import Rendezvous, listening

GRACE_S = 5.0
"""Seconds to wait after a broken connection until a process ends, because that end is the cause to report."""
POLL_S = 0.05


class Ranks:
    """All processes of a group except the first."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Start the processes of this machine; each joins the group once it has started. With several nodes also listen
        for the others. TrainerError, GroupError as `Rendezvous`."""
        hello = Hello(config, str(folder.resolve()))
        self.size = config.trainer.ranks
        self._ending = Ending()
        self.meeting: Rendezvous | None = None
        host = "127.0.0.1"
        if config.trainer.nodes > 1:
            here = wire.coming(config, 0)
            self.meeting = Rendezvous(config.trainer.rendezvous, config.trainer.nodes, here, self._failed)
            host = self.meeting.host
        self.store = _store(host, self.size)
        self.local = LocalRanks(range(1, hello.per_node), hello, Store(host, self.store.port), self._failed)
        self.processes = self.local.processes
        if self.meeting is not None:
            self.meeting.open(wire.Welcome(hello, self.store.port))

    @property
    def why(self) -> str:
        """A text about the first process that ended, and its exit; empty while all run."""
        return self._ending.why

    def _failed(self, why: str) -> None:
        if self._ending.begin(why):
            self._kill()

    def _kill(self) -> None:
        if self.meeting is not None:
            self.meeting.close()
        if hasattr(self, "local"):  # a node may fail before the processes of this machine have started
            self.local.kill()

    def wait(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Return when all processes are about to join the group. GroupError when one ends before.

        The first process calls it before it joins, because nothing ends its wait for a process that never comes.
        waiting: called often, with a text about the nodes that are missing; empty when none is.
        """
        while not self.store.check([_place(rank) for rank in range(1, self.size)]):
            waiting(self.meeting.text if self.meeting is not None else "")
            if self._ending.begun.wait(POLL_S):
                raise GroupError(self.why)

    def cause(self) -> str:
        """After a broken connection: the text about the process that ended first; empty when none did."""
        self._ending.begun.wait(GRACE_S)
        return self.why

    def end(self, settle: Callable[[], None] = lambda: None, *, at_once: bool = False) -> str:
        """Kill the group. Returns as `cause`. settle: called before the group's connections are closed; ends threads
        that use them. at_once: no process has failed."""
        if not at_once:
            self.cause()
        self._ending.begin()
        self._kill()
        self.local.wait()
        settle()
        self._close()
        return self.why

    def stop(self, tell: Callable[[], None]) -> None:
        """End the group after the order to stop, which `tell` sends; kill processes that take longer than STOP_S."""
        if self._ending.begin():
            if self.meeting is not None:
                self.meeting.stop()
            with suppress(RuntimeError):
                tell()
        self.local.wait(STOP_S)
        self._close()

    def _close(self) -> None:
        if self.meeting is not None:
            self.meeting.close()
        self.local.close()
        group.leave()


def _store(host: str, size: int) -> TCPStore:
    """The group's store. It listens at this address alone: by itself it would at every one of the machine."""
    port = (open_socket := listening(host, 0)).getsockname()[1]
    fd = open_socket.detach()
    return TCPStore(
        host, port, size, is_master=True, wait_for_workers=False, timeout=group.PATIENCE, master_listen_fd=fd
    )


def announce() -> None:
    """Say to the first process that this one is about to join the group."""
    place = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    place.set(_place(int(os.environ["RANK"])), "")


def _place(rank: int) -> str:
    return f"arrived/{rank}"


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank on this machine: a CUDA device of its own, or the CPU. rank: among those of its machine."""
    return torch.device("cuda", rank) if device.type == "cuda" else device
