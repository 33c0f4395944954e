"""Node 0's side of the meeting: it listens at `[trainer] rendezvous`, checks each node that comes, and watches it.

A node whose connection ends, or that reports the end of a rank, ends the group. The address is open as long as the
group lives; nodes ask again until the next one opens it.
"""

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from headrace.training.device import TrainerError
from headrace.training.parallel.interface import GroupError, Loss
from headrace.training.parallel.nodes.wire import (
    BEAT_S,
    Beat,
    Coming,
    Ended,
    Later,
    Refused,
    Stop,
    Talk,
    Welcome,
    difference,
)

_HELLO_S = 10.0
"""Seconds until a node must have said its first line."""


def parted(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. ValueError for another text."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"expected HOST:PORT, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; port 0 takes a free one. TrainerError when it is none, or
    cannot be resolved; GroupError when its port is taken."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(place[:2], family=family)
    except socket.gaierror as error:
        raise TrainerError(f"[trainer] rendezvous: cannot resolve {host!r}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise GroupError(f"[trainer] rendezvous: port {port} of {host} is taken by another process") from None
        raise TrainerError(
            f"[trainer] rendezvous: expected an address of this machine, got {host!r}: {error.strerror}"
        ) from None


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rendezvous", daemon=True).start()


class _Guest(NamedTuple):
    """A node that has come."""

    talk: Talk
    host: str


class Rendezvous:
    """The other nodes of a group."""

    def __init__(self, address: str, nodes: int, here: Coming, failed: Callable[[Loss], None]) -> None:
        """Listen at HOST:PORT; it answers after `open`. here: the first line that node 0 would send. failed: gets the
        loss of a node or of its rank. TrainerError, GroupError as `listening`."""
        self.address, self._nodes, self._here, self._failed = address, nodes, here, failed
        self.host, port = parted(address)
        self._socket = listening(self.host, port)
        self._guests: dict[int, _Guest] = {}
        self._refusal = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def open(self, welcome: Welcome) -> None:
        """Answer the nodes from now on."""
        for work in (partial(self._accept, welcome), self._beat):
            _thread(work)

    @property
    def text(self) -> str:
        """A sentence about the nodes that are missing; empty when all are here."""
        with self._lock:
            missing = [str(node) for node in range(1, self._nodes) if node not in self._guests]
            refused = f"; {self._refusal}" if self._refusal else ""
        if not missing:
            return ""
        return f"waiting for node {', '.join(missing)} of the trainer at {self.address}{refused}"

    def _accept(self, welcome: Welcome) -> None:
        while True:
            try:
                connection, place = self._socket.accept()
            except OSError:
                return  # closed
            _thread(partial(self._serve, Talk(connection), place[0], welcome))

    def _serve(self, talk: Talk, host: str, welcome: Welcome) -> None:
        """Answer one connection and read it until it ends."""
        with suppress(OSError, ValueError):
            line = talk.hear(_HELLO_S)
            node = self._answer(line, talk, host, welcome)
            if node:
                self._read(node, talk, host)
        talk.close()

    def _answer(self, line: object, talk: Talk, host: str, welcome: Welcome) -> int:
        """The number of the node that is welcome; 0 for another connection."""
        if not isinstance(line, Coming):
            return 0
        if why := difference(self._here, line, self._nodes):
            with self._lock:
                self._refusal = f"{host} was refused: {why}"
            talk.say(Refused(why))
            return 0
        with self._lock:
            earlier = self._guests.get(line.node)
            if earlier is None and not self._closed.is_set():
                self._guests[line.node] = _Guest(talk, host)
                self._refusal = ""
        if earlier is not None:
            talk.say(Later(f"node {line.node} of the trainer is {earlier.host} until that has gone"))
            return 0
        try:
            talk.say(welcome)
        except OSError as error:
            self._gone(line.node, host, Loss(str(error)))
            return 0
        return line.node

    def _read(self, node: int, talk: Talk, host: str) -> None:
        try:
            while not isinstance(line := talk.hear(), Ended):
                pass
            self._gone(node, host, Loss(line.why, line.alike, line.raised))
        except TimeoutError:
            self._gone(node, host, Loss("it has given no sign of life"))
        except (OSError, ValueError) as error:
            self._gone(node, host, Loss(str(error)))

    def _gone(self, node: int, host: str, loss: Loss) -> None:
        if not self._closed.is_set():
            text = f"node {node} ({host}): {loss.text}"
            self._failed(Loss(text, f"node {node}: {loss.alike or loss.text}", loss.raised))

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for guest in self._here_now():
                with suppress(OSError):
                    guest.talk.say(Beat())

    def _here_now(self) -> list[_Guest]:
        with self._lock:
            return list(self._guests.values())

    def stop(self) -> None:
        """Tell all nodes that their ranks are about to end in order."""
        for guest in self._here_now():
            with suppress(OSError):
                guest.talk.say(Stop())

    def close(self) -> None:
        """Close the address and all connections: the nodes end their ranks."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for guest in self._here_now():
            guest.talk.close()
