"""The processes of a trainer's group, before they are one."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from headrace.config import Config, Policy, Trainer
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.nodes.ranks import Ranks


def test_a_process_that_ends_before_it_joins_ends_the_group(tmp_path: Path) -> None:
    """Without this check the first process waited thirty days for it in the rendezvous."""
    unreadable = msgspec.structs.replace(Policy(), experts=0)  # the other process refuses to read it
    others = Ranks(Config(policy=unreadable, trainer=Trainer(ranks=2)), tmp_path)
    with pytest.raises(GroupError, match=r"rank 1 .* ended with code 1: .*policy.experts"):
        others.wait()
    others.end()
    assert "policy.experts" in others.why


def test_a_process_that_never_comes_ends_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this limit the first process waited thirty days for it."""
    monkeypatch.setattr(group, "JOIN", timedelta(seconds=0.3))
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=group.PATIENCE)
    with pytest.raises(RuntimeError, match="timeout after 300ms"):
        group.join(torch.device("cpu"), 0, 2, store)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_rendezvous_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN", timedelta(seconds=2))
    others = Ranks(Config(trainer=Trainer(ranks=2)), tmp_path)
    others.processes[0].kill()  # it has imported nothing yet, so it never joins
    with pytest.raises(RuntimeError, match=r"Connect timeout|timeout after 2000ms"):
        group.join(torch.device("cpu"), 0, 2, others.store)
    assert "was killed by SIGKILL" in str(others.explained(RuntimeError("a connection")))
    assert distributed_c10d._world.group_count == 0, "the next group of this process has the name that others give it"
    others.end()
