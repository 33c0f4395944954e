"""A small upload does not make git take gigabytes of memory."""

import pytest

from headrace.gateway.agents.requests import AgentRefused, WorkspaceSource
from headrace.gateway.agents.workspace import files_of
from tests.support import forged

pytestmark = pytest.mark.anyio


async def test_a_delta_with_a_huge_result_is_refused_before_it_is_unpacked() -> None:
    bundle = forged.huge_delta(1 << 30)
    assert len(bundle) < 1000
    with pytest.raises(AgentRefused, match="over limit") as refused:
        await files_of(WorkspaceSource(bundle=bundle), ())
    assert refused.value.status == 400
