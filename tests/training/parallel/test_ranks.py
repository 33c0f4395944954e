"""The processes of a trainer's group, before they are one."""

from pathlib import Path

import msgspec
import pytest

from headrace.config import Config, Policy, Trainer
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.ranks import Ranks


def test_a_process_that_ends_before_it_joins_ends_the_group(tmp_path: Path) -> None:
    """The first process waited for it in the rendezvous, for thirty days."""
    unreadable = msgspec.structs.replace(Policy(), experts=0)  # the other process refuses to read it
    others = Ranks(Config(policy=unreadable, trainer=Trainer(ranks=2)), tmp_path)
    with pytest.raises(GroupError, match=r"rank 1 .* ended with code 1: .*policy.experts"):
        others.wait()
    assert "policy.experts" in others.end()
