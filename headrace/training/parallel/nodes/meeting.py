"""The meeting of a trainer's nodes, in one store at an address of node 0: torch's agents get their rendezvous from it.

torch's own rendezvous opens a store at every address of the machine and unpickles what it holds. This one listens at
`[trainer] rendezvous` alone (loopback for one node), and what it holds are numbers, texts and JSON of named types.

The store counts the groups. Each has keys of its own: what node 0 has installed and configured, with which every node
compares itself; the nodes that have come; their beats, because a machine without power closes no connection; and the
loss that ended it, after which all nodes join the next one.
"""

import errno
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import __version__ as torch_version
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

import headrace
from headrace.config import Config
from headrace.messages.plugins import Plugin
from headrace.registry import differing
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import GroupError, Loss
from headrace.training.trainer import plugins_of

POLL_S = 0.1
LOST_S = 15.0
"""Seconds without a beat after which a machine is gone."""
STORE = timedelta(seconds=LOST_S)
"""Time limit of a call of the store; a longer wait asks again and again."""
COMPARED = ("policy", "algorithm", "numerics", "trainer", "curriculum")
"""Sections of the configuration that all nodes must have alike."""
_GROUP = "group"


class Coming(msgspec.Struct, frozen=True):
    """The software and the settings of a node."""

    node: int
    version: str
    """As `version()`."""
    plugins: tuple[Plugin, ...]
    nodes: int
    """Nodes that its configuration expects."""
    settings: dict[str, Any]
    """The sections `COMPARED`."""


@cache
def version() -> str:
    """The version of headrace and torch here, with a hash of headrace's source."""
    digest, root = hashlib.sha256(), Path(headrace.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return f"headrace {headrace.__version__} ({digest.hexdigest()[:12]}) with torch {torch_version}"


def coming(config: Config, node: int) -> Coming:
    """The software and the settings of this node. TrainerError for a plugin that it does not have."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))  # as they arrive
    settings = {name: values[name] for name in COMPARED}
    return Coming(node, version(), plugins_of(config.algorithm), config.trainer.nodes, settings)


def difference(here: Coming, other: Coming) -> str:
    """The reason for which a node may not train along with node 0 (`here`); empty when it may."""
    if not 0 < other.node < here.nodes:
        return f"expected --node 1 to {here.nodes - 1}, because the trainer has {here.nodes} nodes; got {other.node}"
    if other.version != here.version:
        return f"node 0 has {here.version}, node {other.node} has {other.version}; install the same on both"
    for section, values in here.settings.items():
        for key, value in values.items():
            if (there := other.settings.get(section, {}).get(key)) != value:
                return (
                    f"[{section}] {key}: node 0 has {value!r}, node {other.node} has {there!r}; give both the same "
                    "configuration"
                )
    why = differing(here.plugins, other.plugins)
    return f"node {other.node}: {why}" if why else ""


def parted(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. ValueError for another text."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"expected HOST:PORT, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def opened(host: str, port: int) -> TCPStore:
    """A store that listens at an address of this machine alone; port 0 takes a free one. TrainerError when it is none,
    or cannot be resolved; GroupError when its port is taken."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(place[:2], family=family)
    except socket.gaierror as error:
        raise TrainerError(f"[trainer] rendezvous: cannot resolve {host!r}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise GroupError(f"[trainer] rendezvous: port {port} of {host} is taken by another process") from None
        raise TrainerError(
            f"[trainer] rendezvous: expected an address of this machine, got {host!r}: {error.strerror}"
        ) from None
    port = listening.getsockname()[1]
    fd = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=STORE, master_listen_fd=fd)


_lasting = cache(opened)
"""The store at `[trainer] rendezvous`, which all groups of this process have: nodes that have come wait there for the
next one."""


def of_group(store: TCPStore, number: int | str) -> PrefixStore:
    """The keys of one group."""
    return PrefixStore(f"{_GROUP} {number}", store)


class Meeting(RendezvousHandler):
    """The rendezvous of one node, for torch's agent."""

    def __init__(self, store: TCPStore, here: Coming, nodes: int, *, alone: bool) -> None:
        """alone: rank 0, which no agent starts, is the only one of its machine."""
        self.store, self.here, self.nodes, self._first = store, here, nodes, int(alone)
        self.group: PrefixStore
        """Keys of the newest group."""
        self.number = 0
        """Of the newest group."""

    def info(self) -> RendezvousInfo:
        """For the agent. Agents are counted from the first machine that has one."""
        place = RendezvousStoreInfo(self.store.host, self.store.port)
        return RendezvousInfo(self.group, self.here.node - self._first, self.nodes - self._first, place)

    def get_run_id(self) -> str:
        """The number of the group, for its ranks."""
        return str(self.number)

    def get_backend(self) -> str:
        """As `RendezvousHandler`."""
        return "headrace"

    def num_nodes_waiting(self) -> int:
        """No node joins a running group."""
        return 0

    def is_closed(self) -> bool:
        """It never is; `Host.close` ends a wait."""
        return False

    def set_closed(self) -> None:
        """Nothing."""

    def shutdown(self) -> bool:
        """Nothing: the store ends with its process."""
        return True

    def tell(self, loss: Loss) -> None:
        """End the group for all nodes, for the first such reason."""
        with suppress(dist.DistError):
            if not self.group.check(["lost"]):
                self.group.set("lost", msgspec.json.encode(loss).decode())


class MeetingHost(Meeting):
    """Node 0's."""

    def __init__(self, config: Config) -> None:
        """Open the next group. TrainerError, GroupError as `opened`."""
        section = config.trainer
        nodes = section.nodes
        store = _lasting(*parted(section.rendezvous)) if nodes > 1 else opened("127.0.0.1", 0)
        super().__init__(store, coming(config, 0), nodes, alone=section.machine_ranks == 1)
        self.address = section.rendezvous
        self.number = store.add(_GROUP, 1)
        # A store of its own: a call waits until another thread's call has returned, such as the training thread's.
        self.group = of_group(store.clone(), self.number)  # type: ignore[attr-defined]
        self._tokens: dict[int, bytes] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._closed = threading.Event()
        self.group.set("here", msgspec.json.encode(self.here).decode())

    def missing(self) -> str:
        """A sentence about the nodes that are missing; empty when all are here, which lets them start."""
        for node in range(1, self.nodes):
            if node not in self._tokens and self.group.check([f"came/{node}"]):
                self._tokens[node] = self.group.get(f"came/{node}")
        missing = [str(node) for node in range(1, self.nodes) if node not in self._tokens]
        if not missing:
            self.group.set("complete", "")
            return ""
        refused = f"; {self.group.get('refused').decode()}" if self.group.check(["refused"]) else ""
        return f"waiting for node {', '.join(missing)} of the trainer at {self.address}{refused}"

    def next_rendezvous(self) -> RendezvousInfo:
        """When all nodes are here. RendezvousClosedError after `close`."""
        while not self.group.check(["complete"]):
            if self._closed.wait(POLL_S):
                raise RendezvousClosedError
        return self.info()

    def lost(self) -> Loss | None:
        """The loss of a node, or of a rank that a node has told."""
        if self.group.check(["lost"]):
            return msgspec.json.decode(self.group.get("lost"), type=Loss)
        for node, token in self._tokens.items():
            if self.group.get(f"came/{node}") != token:
                return Loss(f"node {node} has come again, so its ranks had ended", f"node {node}: it has come again")
            beat, now = self.group.add(f"beat/{node}", 0), time.monotonic()
            last, since = self._beats.setdefault(node, (beat, now))
            if beat != last:
                self._beats[node] = beat, now
            elif now - since > LOST_S:
                return Loss(f"node {node}: it has given no sign of life for {LOST_S:g} s")
        return None

    def close(self) -> None:
        """No node joins this group from now on; end the wait of `next_rendezvous`."""
        self._closed.set()
        self.group.set("over", "")


class Guest(Meeting):
    """Another node's."""

    def __init__(self, store: TCPStore, config: Config, node: int, joined: Callable[[], None] = lambda: None) -> None:
        """store: node 0's. joined: called when all nodes of a group are here. TrainerError as `coming`."""
        super().__init__(store, coming(config, node), config.trainer.nodes, alone=config.trainer.machine_ranks == 1)
        self._heard, self._joined = time.monotonic(), joined

    def next_rendezvous(self) -> RendezvousInfo:
        """When all nodes are here. TrainerError when this one differs from node 0."""
        while not (self._come() and self._complete()):
            time.sleep(POLL_S)
        self._heard = time.monotonic()
        self._joined()
        return self.info()

    def _come(self) -> bool:
        """Whether there is a new group; this node has joined it then."""
        number = self.store.add(_GROUP, 0)
        group = of_group(self.store, number)
        if number in (0, self.number) or group.check(["lost"]) or group.check(["over"]):
            return False
        self.number, self.group, node = number, group, self.here.node
        if why := difference(msgspec.json.decode(self.group.get("here"), type=Coming), self.here):
            self.group.set("refused", f"{socket.gethostname()} was refused: {why}")
            raise TrainerError(f"the trainer refuses this node: {why}")
        self.group.set(f"came/{node}", f"{socket.gethostname()} {os.getpid()} {time.time()}")
        return True

    def _complete(self) -> bool:
        """Whether all nodes have joined this group, before it ends."""
        while not self.group.check(["complete"]):
            if self.num_nodes_waiting():
                return False
            time.sleep(POLL_S)
        return True

    def num_nodes_waiting(self) -> int:
        """1 when the group has ended: the agent then joins the next one. It also says that this node is alive."""
        try:
            self.group.add(f"beat/{self.here.node}", 1)
            ended = self.store.add(_GROUP, 0) != self.number or self.group.check(["lost"])
            self._heard = time.monotonic()
        except dist.DistError:  # its ranks notice that, and the end in order is theirs to tell
            if time.monotonic() - self._heard > LOST_S:
                raise
            return 0
        return int(ended)
