"""Starts the other processes of a trainer's group and ends them with the first process.

Those of this machine are its children (`nodes.local`); other machines come to the rendezvous and start theirs
(`nodes.rendezvous`). When one of them ends, a thread kills the rest: the collective in which the first process waits
then raises an error.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.config import Config
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError, Loss, StepRaised
from headrace.training.parallel.nodes import wire
from headrace.training.parallel.nodes.local import POLL_S, STOP_S, Ending, Hello, LocalRanks, Store
from headrace.training.parallel.nodes.logs import folder_of
from headrace.training.parallel.nodes.rendezvous import Rendezvous, listening
from headrace.training.parallel.nodes.silence import Silence

GRACE_S = 5.0
"""Seconds to wait after a broken connection until a process ends, because that end is the cause to report."""
DUMP_S = 1.0
"""Seconds for ranks to write their stacks to their logs."""


class Ranks:
    """All processes of a group except the first."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Start the processes of this machine; each joins the group once it has started. With several nodes also listen
        for the others. TrainerError, GroupError as `Rendezvous`."""
        hello = Hello(config, str(folder.resolve()))
        self.size, self._stall_s = config.trainer.ranks, config.trainer.stall_s
        self._ending = Ending()
        self.meeting: Rendezvous | None = None
        host = "127.0.0.1"
        if config.trainer.nodes > 1 and config.trainer.rendezvous:
            here = wire.coming(config, 0)
            self.meeting = Rendezvous(config.trainer.rendezvous, config.trainer.nodes, here, self.fail)
            host = self.meeting.host
        self.store = _store(host, self.size)
        store = Store(host, self.store.port)
        self.logs = folder_of(os.environ, folder.resolve().parent)
        self.local = LocalRanks(range(1, config.trainer.machine_ranks), hello, store, self.fail, self.logs)
        self.processes = self.local.processes
        self.silence = Silence(self._stall_s, self._silent)
        if self.meeting is not None:
            self.meeting.open(wire.Welcome(hello, self.store.port))

    @property
    def why(self) -> str:
        """As `interface.Others`."""
        return self._ending.loss.text

    @property
    def busy(self) -> bool:
        """As `interface.Others`."""
        return self.silence.busy

    def fail(self, loss: Loss) -> None:
        """As `interface.Others`."""
        if self._ending.begin(loss):
            self._kill()

    def _silent(self, orders: str) -> None:
        """No rank has made progress for too long: let all write their stacks, and end the group."""
        stopped = [f"rank {rank} is stopped by a signal; " for rank in self.local.stopped()]
        with suppress(OSError, ValueError, AttributeError):  # a standard error without a file
            faulthandler.dump_traceback(sys.__stderr__)  # type: ignore[arg-type]
        self.local.dump()
        time.sleep(DUMP_S)
        alike = f"no rank made progress for {self._stall_s:g} s in {orders}"
        what = f"{''.join(stopped)}the logs of the ranks in {self.logs} have the stacks of their threads"
        help = "raise [trainer] stall_s where a rank needs longer between two exchanges"
        self.fail(Loss(f"{alike}: {what}; {help}", alike))

    def _kill(self) -> None:
        if self.meeting is not None:
            self.meeting.close()
        if hasattr(self, "local"):  # a node may fail before the processes of this machine have started
            self.local.kill()
        group.abort()

    def wait(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Return when all processes are about to join the group. GroupError when one ends before.

        The first process calls it before it joins, because nothing ends its wait for a process that never comes.
        waiting: called often, with a text about the nodes that are missing; empty when none is.
        """
        while not self.store.check([_place(rank) for rank in range(1, self.size)]):
            waiting(self.meeting.text if self.meeting is not None else "")
            if self._ending.begun.wait(POLL_S):
                raise self.explained(RuntimeError("a process has ended"))

    def explained(self, error: Exception, where: str = "", *, step: bool = False) -> GroupError:
        """The error to report for one that the end of a process may have caused: it names the process that ended first,
        for whose end this waits a while. where: the moment, for `GroupError.alike`. step: the error is that of a step,
        and is a StepRaised when no process was lost."""
        raised_here = step and not group.broken(error)
        self._ending.begun.wait(0.0 if raised_here else GRACE_S)
        text = f"{type(error).__name__}: {error}"
        loss = self._ending.loss
        if not loss.text:
            loss = Loss(f"rank 0: {text}", f"rank 0: {text}", f"rank 0: {text}" if raised_here else "")
        alike = f"{where}: {loss.alike or loss.text}" if where else loss.alike or loss.text
        return StepRaised(loss.text, alike, loss.raised) if step and loss.raised else GroupError(loss.text, alike)

    def end(self, settle: Callable[[], None] = lambda: None) -> None:
        """Kill the group. settle: called before the group's connections are closed; ends threads that use them."""
        self._ending.begin(Loss(""))
        self._kill()
        self.local.wait()
        settle()
        self._close()

    def stop(self, tell: Callable[[], None]) -> None:
        """End the group after the order to stop, which `tell` sends; kill processes that take longer than STOP_S."""
        if self._ending.begin(Loss("")):
            if self.meeting is not None:
                self.meeting.stop()
            with suppress(RuntimeError):
                tell()
        self.local.wait(STOP_S)
        self._close()

    def _close(self) -> None:
        self.silence.close()
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
