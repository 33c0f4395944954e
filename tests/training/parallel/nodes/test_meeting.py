"""The meeting of a trainer's nodes in a real store, without ranks."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from headrace.config import Config, Mesh, Trainer
from headrace.messages.plugins import Plugin
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import GroupError, Loss
from headrace.training.parallel.nodes import join, meeting
from headrace.training.parallel.nodes.meeting import Coming, Guest, MeetingHost, coming, difference, opened
from tests.support.listening import listening
from tests.support.patience import PATIENCE_S

PLUGIN = Plugin(seam="losses", name="mine:loss", source="a" * 64)


def config(**trainer: object) -> Config:
    """Of two nodes that meet at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    section = Trainer(mesh=Mesh(shard=2), node_ranks=1, rendezvous=f"127.0.0.1:{port}", rescore=3)
    return Config(trainer=msgspec.structs.replace(section, **trainer))


def reached(setting: Config) -> TCPStore:
    """The store as another node reaches it."""
    host, port = meeting.parted(setting.trainer.rendezvous)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))


@contextmanager
def met() -> Iterator[tuple[Config, MeetingHost, Guest, ThreadPoolExecutor]]:
    """Node 0, and node 1 that has come to its first group."""
    setting = config()
    host, guest = MeetingHost(setting), Guest(reached(setting), setting, 1)
    with ThreadPoolExecutor(1) as pool:
        come = pool.submit(guest.next_rendezvous)
        until(lambda: not host.missing())
        come.result(PATIENCE_S)
        try:
            yield setting, host, guest, pool
        finally:
            host.close()


def until(held: Callable[[], bool]) -> None:
    """Return when it holds."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if held():
            return
        threading.Event().wait(0.02)
    raise TimeoutError


SETTING = config()
HERE, COMES = coming(SETTING, 0), coming(SETTING, 1)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (msgspec.structs.replace(COMES, node=2), "expected --node 1 to 1, because the trainer has 2 nodes; got 2"),
        (
            msgspec.structs.replace(COMES, version="headrace 0.0"),
            f"node 0 has {meeting.version()}, node 1 has headrace 0.0; install the same on both",
        ),
        (
            coming(msgspec.structs.replace(SETTING, trainer=msgspec.structs.replace(SETTING.trainer, rescore=4)), 1),
            "[trainer] rescore: node 0 has 3, node 1 has 4; give both the same configuration",
        ),
    ],
)
def test_a_node_that_differs_is_told_the_difference(other: Coming, says: str) -> None:
    assert difference(HERE, other) == says
    assert not difference(HERE, COMES)


def test_another_source_of_a_plugin_is_refused() -> None:
    here, other = (msgspec.structs.replace(each, plugins=(PLUGIN,)) for each in (HERE, COMES))
    assert not difference(here, other)
    changed = msgspec.structs.replace(other, plugins=(msgspec.structs.replace(PLUGIN, source="b" * 64),))
    assert "node 1: headrace.losses: mine:loss has source hash bbbbbbbbbbbb" in difference(here, changed)


def test_a_node_that_differs_ends_with_the_reason_and_the_right_one_is_welcome_later() -> None:
    setting = config()
    host = MeetingHost(setting)
    other = msgspec.structs.replace(setting, trainer=msgspec.structs.replace(setting.trainer, rescore=4))
    with pytest.raises(TrainerError, match=r"refuses this node: \[trainer\] rescore: node 0 has 3, node 1 has 4"):
        join.join(other, 1, setting.trainer.rendezvous, print)
    assert "was refused: [trainer] rescore: node 0 has 3" in host.missing()
    assert host.missing().startswith(f"waiting for node 1 of the trainer at {setting.trainer.rendezvous}; ")
    with ThreadPoolExecutor(1) as pool:
        come = pool.submit(Guest(reached(setting), setting, 1).next_rendezvous)
        until(lambda: not host.missing())
        info = come.result(PATIENCE_S)
    assert (info.rank, info.world_size) == (0, 1), "the only machine with an agent: rank 0 is alone on its own"
    host.close()


def test_a_loss_reaches_all_nodes_which_come_to_the_next_group_alone() -> None:
    with met() as (setting, host, guest, pool):
        assert host.lost() is None and guest.num_nodes_waiting() == 0
        loss = Loss("node 1: rank 1 raised", "rank 1 raised", "ValueError: no")
        guest.tell(loss)
        guest.tell(Loss("another"))
        assert host.lost() == loss, "the first one"
        assert guest.num_nodes_waiting() == 1
        host.close()
        again = pool.submit(guest.next_rendezvous)
        second = MeetingHost(setting)
        assert (second.number, second.store.port) == (2, host.store.port)
        until(lambda: not second.missing())
        again.result(PATIENCE_S)
        assert guest.get_run_id() == "2" and second.lost() is None
        second.close()


def test_a_node_that_comes_again_or_is_silent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with met() as (setting, host, guest, pool):
        assert host.lost() is None
        late = pool.submit(Guest(reached(setting), setting, 1).next_rendezvous)
        late.result(PATIENCE_S)
        assert host.lost() == Loss("node 1 has come again, so its ranks had ended", "node 1: it has come again")
    monkeypatch.setattr(meeting, "LOST_S", 0.1)
    with met() as (_, host, guest, _):
        guest.num_nodes_waiting()
        assert host.lost() is None
        until(lambda: host.lost() == Loss("node 1: it has given no sign of life for 0.1 s"))


NODE_0 = """
import sys
from headrace.training.parallel.nodes.meeting import opened
store = opened("127.0.0.1", 0)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_node_leaves_a_node_0_of_which_it_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: its ranks end by themselves, and may have ended in order."""
    argv = [sys.executable, "-c", NODE_0]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node_0:
        assert node_0.stdout is not None
        store = TCPStore("127.0.0.1", int(node_0.stdout.readline()), is_master=False, wait_for_workers=False)
        guest = Guest(store, SETTING, 1)
        guest.number, guest.group = 1, meeting.of_group(store, 1)
        assert guest.num_nodes_waiting() == 1, "the store has no such group"
        node_0.kill()
    assert guest.num_nodes_waiting() == 0
    monkeypatch.setattr(meeting, "LOST_S", 0.0)
    with pytest.raises(dist.DistError):
        guest.num_nodes_waiting()


def test_the_wait_for_nodes_ends() -> None:
    host = MeetingHost(config())
    host.close()
    with pytest.raises(RendezvousClosedError):
        host.next_rendezvous()


def test_a_node_waits_for_its_trainer_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "AGAIN_S", 0.01)
    said: list[str] = []
    with pytest.raises(TrainerError, match=r"no trainer at 127\.0\.0\.1:1 has taken node 1 within 0\.05 s"):
        join.join(config(), 1, "127.0.0.1:1", said.append, wait_s=0.05)
    assert said == ["node 1 waits for the trainer at 127.0.0.1:1: Connection refused"]


@pytest.mark.parametrize("address", ["node0", "node0:", ":29500", "node0:65536", ""])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(TrainerError, match="the rendezvous of the trainer: expected HOST:PORT, got"):
        join.join(config(), 1, address, print)


def test_another_server_is_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes the connection of the store."""
    monkeypatch.setattr(join, "AGAIN_S", 0.01)
    monkeypatch.setattr(join, "STORE", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TrainerError, match=f"no trainer at {where} has taken node 1"):
            join.join(config(), 1, where, print, wait_s=0.05)
        server.shutdown(socket.SHUT_RDWR)


def test_the_trainer_listens_at_an_address_of_its_machine_alone() -> None:
    with pytest.raises(TrainerError, match=r"expected an address of this machine, got '192\.0\.2\.1'"):
        opened("192.0.2.1", 0)
    store = opened("127.0.0.1", 0)
    assert {each.host for each in listening([os.getpid()]) if each.port == store.port} == {"127.0.0.1"}
    with pytest.raises(GroupError, match="is taken by another process"):
        opened("127.0.0.1", store.port)


def test_the_version_names_the_source_of_headrace() -> None:
    assert meeting.version().startswith("headrace 0.1.0 (") and " with torch 2." in meeting.version()
