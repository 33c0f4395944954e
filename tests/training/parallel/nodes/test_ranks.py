"""The processes of a trainer's group, before they are one."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from headrace.config import Config, Mesh, Policy, Trainer
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.nodes.meeting import opened
from headrace.training.parallel.nodes.ranks import Ranks
from tests.support.rank_processes import ranks_of


def test_a_process_that_ends_before_it_joins_ends_the_group(tmp_path: Path) -> None:
    """Without this check the first process waited thirty days for it in the rendezvous."""
    others = Ranks(Config(trainer=Trainer(mesh=Mesh(shard=2))), tmp_path)
    unreadable = msgspec.structs.replace(Policy(), experts=0)  # the other process refuses to read it
    others.hello = msgspec.structs.replace(
        others.hello, config=Config(policy=unreadable, trainer=Trainer(mesh=Mesh(shard=2)))
    )
    others.wait()
    assert others._begun.wait(60.0)
    error = others.explained(RuntimeError("a process has ended"))
    others.end()
    assert "rank 1 (process" in str(error) and "ended with code 2: ValidationError" in str(error)
    assert "policy.experts" in others.why and not ranks_of()


def test_a_process_that_never_comes_ends_the_rendezvous() -> None:
    """Without this limit the first process waited thirty days for it."""
    with pytest.raises(RuntimeError, match="timeout after 300ms"):
        group.join(torch.device("cpu"), 0, 2, PrefixStore("group", opened("127.0.0.1", 0)), timedelta(seconds=0.3))
    assert not dist.is_initialized()


def test_a_process_that_is_killed_before_it_comes_ends_the_wait(tmp_path: Path) -> None:
    others = Ranks(Config(trainer=Trainer(mesh=Mesh(shard=2))), tmp_path)
    killed = False

    def kill(_: str) -> None:
        nonlocal killed
        assert others.agent is not None
        if not killed and others.agent.pids:
            killed = True
            others.agent.kill()  # it has imported nothing yet, so it never joins

    with pytest.raises(GroupError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        others.wait(kill)
    assert distributed_c10d._world.group_count == 0, "the next group of this process has the name that others give it"
    others.end()
    assert not ranks_of()


def test_a_group_that_ends_before_its_ranks_have_started_leaves_none(tmp_path: Path) -> None:
    """Its agent may be about to start them."""
    for _ in range(3):
        Ranks(Config(trainer=Trainer(mesh=Mesh(shard=3))), tmp_path).end()
        assert not ranks_of()
