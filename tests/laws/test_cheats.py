"""A pass means a repair: runs the known cheats (benchmarks/cheats.py has the catalogue and its table)."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from benchmarks.cheats import CHEATS, Cheat, CheatHost, Row
from headrace.config import Environment
from headrace.messages.tasks import Oracle
from headrace.tasks import sealing
from headrace.tasks.generated.repositories import make
from headrace.tasks.sealing import seal
from headrace.vmhost.node.host import Host
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")
INSIDE = (
    "equals_everything",
    "reads_the_expectation",
    "patches_the_runner",
    "forges_the_result_frame",
)
"""Attacks on the process that runs the tests: a judge that believes it lets all of them pass."""
OPEN: tuple[str, ...] = ()
"""The cheats that are known to get through."""


def with_text_alone(oracle: Oracle) -> Oracle:
    """As a suite has it that was made before values were recorded."""
    sealed = seal(oracle.hidden)
    return msgspec.structs.replace(oracle, sealed=sealed.files, answers=sealing.known(sealed))


def named(*names: str) -> list[Cheat]:
    return [cheat for cheat in CHEATS if cheat.name in names]


@pytest.fixture(scope="module")
async def cheat_host() -> AsyncIterator[CheatHost]:
    host = await Host.open(Environment(backend="process"))
    yield CheatHost(host, make("heldout", 0))
    await host.close()


@pytest.mark.parametrize("cheat", named(*INSIDE), ids=lambda cheat: cheat.name)
async def test_the_process_that_runs_the_tests_can_be_taken_and_the_verdict_can_not(
    cheat_host: CheatHost, cheat: Cheat
) -> None:
    row = await cheat_host.play(cheat)
    assert (row.plain, row.sealed) == ("passed", "failed")


async def test_two_computed_values_can_not_be_made_up(cheat_host: CheatHost) -> None:
    (cheat,) = named("forges_two_computed_values")
    row = await cheat_host.play(cheat)
    assert row.sealed == "failed"
    oracle = cheat_host.oracle(cheat)
    with_values, compared = await cheat_host.with_seals(oracle), with_text_alone(oracle)
    assert [text for ((_, text),) in with_values.answers.values()] == ["True"]
    for sealed, forged in ((with_values, "failed"), (compared, "passed")):
        assert await cheat_host.judge(sealed, oracle.solution) == ("passed", ())
        assert (await cheat_host.judge(sealed, cheat_host.code(cheat)))[0] == forged


async def test_an_honest_repair_passes_sealed_tests(cheat_host: CheatHost) -> None:
    oracle = cheat_host.made.oracle
    assert oracle.sealed and set(oracle.answers) == set(oracle.expected)
    assert await cheat_host.judge(oracle, oracle.solution) == ("passed", ())
    assert (await cheat_host.judge(oracle, {}))[0] == "failed"


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_whole_table_in_real_machines() -> None:
    changes: dict[str, Any] = {"backend": "qemu", "cache_dir": CACHE}
    host = await Host.open(Environment(**changes))
    try:
        cheat_host = CheatHost(host, make("heldout", 1))
        rows: list[Row] = [await cheat_host.play(cheat) for cheat in CHEATS]
    finally:
        await host.close()
    assert len(rows) >= 10
    assert {row.name for row in rows if row.fate == "neither"} == set(OPEN)
    assert all(row.fate.startswith("prevented") for row in rows if row.name not in OPEN)
    assert {row.name for row in rows if row.leak} == set()
