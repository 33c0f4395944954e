"""Sender, receiver and broker die in the middle of versions: `make chaos-weights`, a few rounds of it."""

import asyncio
from pathlib import Path

import pytest

from benchmarks import weight_chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_dies_no_part_of_a_version_is_seen(tmp_path: Path) -> None:
    figures = asyncio.run(weight_chaos.chaos(tmp_path, 6, seed=3))
    assert figures["wrong"] == []
    assert (figures["chain_faults"], figures["chain_versions"], figures["equal_to_trainer"]) == (0, 6, True)
    assert figures["heads"] == 6 and figures["files_hashed"] > 6
