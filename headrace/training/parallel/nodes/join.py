"""Another node's side of the meeting: `headrace trainer join`.

It asks node 0 until it is welcome, starts the ranks of this machine, and watches them and the connection. When one of
them ends, or node 0 has gone, it kills its ranks and asks again: so a group that has ended is started again on all
nodes without an operator.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.config import Config
from headrace.inner_paths import is_inner
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import Loss
from headrace.training.parallel.nodes import wire
from headrace.training.parallel.nodes.local import STOP_S, Ending, LocalRanks, Store
from headrace.training.parallel.nodes.logs import folder_of
from headrace.training.parallel.nodes.rendezvous import parted
from headrace.training.parallel.nodes.wire import BEAT_S, Beat, Coming, Ended, Later, Refused, Stop, Talk, Welcome

AGAIN_S = 1.0
"""Seconds between two questions."""
REMIND_S = 60.0
"""Seconds after which the same text is said again."""
CONNECT_S = 10.0


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
    when node 0 refuses this node, the time is over, or the address is none.
    """
    try:
        host, port = parted(address)
    except ValueError as error:
        raise TrainerError(f"the rendezvous of the trainer: {error}") from None
    here, told, since = wire.coming(config, node), Told(say), time.monotonic()
    while True:
        talk, why = _asked(host, port, here)
        if isinstance(talk, tuple):
            connection, welcome = talk
            say(f"node {node} has joined the trainer at {address}: {welcome.hello.config.trainer.machine_ranks} ranks")
            name = Path(welcome.hello.folder).parent.name
            if not is_inner(name):
                raise TrainerError(f"the trainer at {address} names no folder of a run: {welcome.hello.folder!a:.200}")
            run = Path(config.run.dir) / name
            stopped, why = Membership(connection, welcome, node, host, folder_of(os.environ, run)).run()
            say(f"node {node} has left the trainer at {address}: {why}")
            if stopped and once:
                return
            since = time.monotonic()
            continue
        told(f"node {node} waits for the trainer at {address}: {why}")
        if wait_s and time.monotonic() - since > wait_s:
            raise TrainerError(f"no trainer at {address} has taken node {node} within {wait_s:g} s: {why}")
        time.sleep(AGAIN_S)


def _asked(host: str, port: int, here: Coming) -> tuple[tuple[Talk, Welcome] | None, str]:
    """A connection and its welcome, or the reason to ask again. TrainerError when node 0 refuses this node, or is no
    trainer."""
    try:
        talk = Talk(socket.create_connection((host, port), CONNECT_S))
    except OSError as error:
        return None, error.strerror or str(error)
    try:
        talk.say(here)
        line = talk.hear()
    except OSError as error:
        talk.close()
        return None, str(error)
    except ValueError as error:
        talk.close()
        raise TrainerError(f"{host}:{port} is no trainer: {error}") from None
    if isinstance(line, Welcome):
        return (talk, line), ""
    talk.close()
    if isinstance(line, Refused):
        raise TrainerError(f"the trainer at {host}:{port} refuses this node: {line.why}")
    return None, line.why if isinstance(line, Later) else f"it said {type(line).__name__}"


class Membership:
    """This node's part of one group."""

    def __init__(self, talk: Talk, welcome: Welcome, node: int, host: str, logs: Path) -> None:
        """Start the ranks of this node. logs: folder of their logs."""
        self._talk, self._ending, self._stopped = talk, Ending(), False
        count = welcome.hello.config.trainer.machine_ranks
        self.local = LocalRanks(
            range(node * count, (node + 1) * count), welcome.hello, Store(host, welcome.port), self._failed, logs
        )

    def run(self) -> tuple[bool, str]:
        """Return when the group has ended: whether in order, and why."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while not isinstance(self._talk.hear(), Stop):
                pass
            self._stopped = self._ending.begin(Loss("it has stopped"))
        except TimeoutError:
            self._ending.begin(Loss("it has given no sign of life"))
        except (OSError, ValueError) as error:
            self._ending.begin(Loss(f"{error}"))
        if not self._stopped:
            self.local.kill()
        self.local.wait(STOP_S)
        self._talk.close()
        self.local.close()
        return self._stopped, self._ending.loss.text

    def _failed(self, loss: Loss) -> None:
        """A rank has ended: tell node 0, which ends the group and closes the connection."""
        if self._ending.begin(loss):
            with suppress(OSError):
                self._talk.say(Ended(loss.text, loss.alike, loss.raised))
            self._talk.close()

    def _beat(self) -> None:
        while not self._ending.begun.wait(BEAT_S):
            with suppress(OSError):
                self._talk.say(Beat())
