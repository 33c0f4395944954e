"""A small upload does not make git take gigabytes of memory."""

from pathlib import Path

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


async def test_a_bundle_that_names_a_repository_of_the_gateways_machine_is_refused(tmp_path: Path) -> None:
    repository = forged.repository_at(tmp_path / "r")
    forged.commit_of(repository, ("100644", b"secret", forged.blob(repository, b"x")))
    with pytest.raises(AgentRefused, match="expected a git bundle"):
        await files_of(WorkspaceSource(bundle=f"gitdir: {repository}/.git\n".encode()), ())
