"""`headrace rollback` as a process of its own, against gateways and rollout actors that serve clients meanwhile."""

from pathlib import Path

import pytest

from benchmarks.rollback import measure, targets

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_rollback_by_command_reaches_every_replica_and_no_request_fails(tmp_path: Path) -> None:
    figures = await measure(tmp_path, clients=6, before_s=3.0, after_s=6.0)
    assert {name: target.value for name, target in targets(figures).items() if not target.met} == {}, figures
    assert figures["sessions_after"] > 0
