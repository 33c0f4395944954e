"""The meeting of a trainer's nodes over real connections, without ranks."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue

import msgspec
import pytest

from headrace.config import Config, Trainer
from headrace.messages.plugins import Plugin
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import GroupError, Loss
from headrace.training.parallel.nodes import join, wire
from headrace.training.parallel.nodes.local import Hello
from headrace.training.parallel.nodes.rendezvous import Rendezvous, listening, parted
from headrace.training.parallel.nodes.wire import Beat, Coming, Ended, Later, Refused, Stop, Talk, Welcome

WAIT_S = 30.0
PLUGIN = Plugin(seam="losses", name="mine:loss", source="a" * 64)


def config(**trainer: object) -> Config:
    section = Trainer(ranks=2, nodes=2, rendezvous="127.0.0.1:29500", rescore=3)
    return Config(trainer=msgspec.structs.replace(section, **trainer))


HERE = wire.coming(config(), 0)
WELCOME = Welcome(Hello(config(), "/runs/one"), 7)


class Meeting:
    """A rendezvous at a free port, and the texts about nodes that have gone."""

    def __init__(self) -> None:
        self.gone: Queue[Loss] = Queue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.rendezvous = Rendezvous(self.address, 2, HERE, self.gone.put)
        self.rendezvous.open(WELCOME)

    def ask(self, line: Coming) -> tuple[Talk, wire.Line]:
        talk = Talk(socket.create_connection(parted(self.address), WAIT_S))
        talk.say(line)
        return talk, talk.hear(WAIT_S)


@contextmanager
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    try:
        yield made
    finally:
        made.rendezvous.close()


COMES = wire.coming(config(), 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: msgspec.structs.replace(COMES, node=2), "expected --node 1 to 1, because [trainer] nodes = 2; got 2"),
        (
            lambda: msgspec.structs.replace(COMES, version="headrace 0.0"),
            f"node 0 has {wire.version()}, node 1 has headrace 0.0; install the same on both",
        ),
        (
            lambda: wire.coming(config(rescore=4), 1),
            "[trainer] rescore: node 0 has 3, node 1 has 4; give both the same configuration",
        ),
    ],
)
def test_a_node_that_differs_is_refused_with_the_difference(change: Callable[[], Coming], says: str) -> None:
    with meeting() as made:
        talk, answer = made.ask(change())
        assert answer == Refused(says)
        assert (
            made.rendezvous.text
            == f"waiting for node 1 of the trainer at {made.address}; 127.0.0.1 was refused: {says}"
        )
        talk.close()
        talk, answer = made.ask(COMES)
        assert answer == WELCOME and not made.rendezvous.text, "the right one is welcome later"
        talk.close()


def test_another_source_of_a_plugin_is_refused() -> None:
    here, other = (msgspec.structs.replace(each, plugins=(PLUGIN,)) for each in (HERE, COMES))
    assert not wire.difference(here, other, 2)
    changed = msgspec.structs.replace(other, plugins=(msgspec.structs.replace(PLUGIN, source="b" * 64),))
    assert "node 1: headrace.losses: mine:loss has source hash bbbbbbbbbbbb" in wire.difference(here, changed, 2)


def test_one_machine_at_a_time_is_a_node_and_its_end_is_told() -> None:
    with meeting() as made:
        first, _ = made.ask(COMES)
        second, answer = made.ask(COMES)
        assert answer == Later("node 1 of the trainer is 127.0.0.1 until that has gone")
        second.close()
        first.say(Beat())
        first.say(Ended("rank 1 (process 7) raised", "rank 1 raised", "ValueError: no"))
        assert made.gone.get(timeout=WAIT_S) == Loss(
            "node 1 (127.0.0.1): rank 1 (process 7) raised", "node 1: rank 1 raised", "ValueError: no"
        )
        first.close()
    with meeting() as made:
        first, _ = made.ask(COMES)
        first.close()
        assert made.gone.get(timeout=WAIT_S).text == "node 1 (127.0.0.1): it closed the connection"


def test_a_silent_node_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LOST_S", 0.05)
    with meeting() as made:
        first, _ = made.ask(COMES)
        assert made.gone.get(timeout=WAIT_S).text == "node 1 (127.0.0.1): it has given no sign of life"
        first.close()


def test_nodes_are_told_of_a_stop() -> None:
    with meeting() as made:
        first, _ = made.ask(COMES)
        made.rendezvous.stop()
        assert first.hear(WAIT_S) == Stop()
        first.close()


def test_a_node_waits_for_its_trainer_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "AGAIN_S", 0.01)
    said: list[str] = []
    with pytest.raises(TrainerError, match=r"no trainer at 127\.0\.0\.1:1 has taken node 1 within 0\.05 s"):
        join.join(config(), 1, "127.0.0.1:1", said.append, wait_s=0.05)
    assert said == ["node 1 waits for the trainer at 127.0.0.1:1: Connection refused"]


def test_a_node_that_is_refused_ends_with_the_reason() -> None:
    with meeting() as made, pytest.raises(TrainerError, match=r"refuses this node: \[trainer\] rescore: node 0 has 3"):
        join.join(config(rescore=4), 1, made.address, print)


@pytest.mark.parametrize("address", ["node0", "node0:", ":29500", "node0:65536", ""])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(TrainerError, match="the rendezvous of the trainer: expected HOST:PORT, got"):
        join.join(config(), 1, address, print)


def test_another_server_is_no_trainer() -> None:
    with listening("127.0.0.1", 0) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TrainerError, match=rf"{where} is no trainer: expected a line of a trainer, got b'HTTP/1.1"):
            join.join(config(), 1, where, print)
        thread.join()


def test_the_trainer_listens_at_an_address_of_its_machine_alone() -> None:
    with pytest.raises(TrainerError, match=r"expected an address of this machine, got '192\.0\.2\.1'"):
        listening("192.0.2.1", 0)
    with listening("127.0.0.1", 0) as server, pytest.raises(GroupError, match="is taken by another process"):
        listening("127.0.0.1", server.getsockname()[1])


def test_the_version_names_the_source_of_headrace() -> None:
    assert wire.version().startswith("headrace 0.1.0 (") and " with torch 2." in wire.version()
