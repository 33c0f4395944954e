"""`headrace up` with a harness and headrace's own agent: trained, replayed, audited."""

import json
from pathlib import Path

import pytest

from headrace.config import Program
from headrace.harnesses import bundles
from tests.launch.test_pretrained import checkpoint
from tests.launch.test_up import DEMO, FEW, HEADRACE, command, up
from tests.support import small_harness

__all__ = ["checkpoint"]


def table(program: Program) -> dict[str, object]:
    return {"harnesses.small.install": program.install, "harnesses.small.command": list(program.command)}


@pytest.mark.slow  # a whole `headrace up`
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_a_run_of_a_harness_is_trained_replayed_and_audited(checkpoint: Path, tmp_path: Path) -> None:
    own = small_harness.program(tmp_path / "bundle")
    bundles.make(tmp_path / "cache", own)
    tiny = FEW | {
        "policy.checkpoint": str(checkpoint),
        "environment.backend": "process",
        "environment.cache_dir": str(tmp_path / "cache"),
        "mid_training.tokens": 0,
        "curriculum.steps": 1,
        "curriculum.group_size": 2,
        "curriculum.groups_per_step": 4,
        "curriculum.staleness": 0,
        "harness.mix.own": 1,
        "harness.mix.small": 1,
        "harness.arguments": ["forever", "title"],
        "limits.max_turns": 3,
        "limits.context_tokens": 512,
        **table(own),
    }
    async with up(tmp_path, *HEADRACE, "up", str(DEMO), **tiny) as run:
        code, said = await run.end(500.0)
    assert code == 0, said
    replayed = command(tmp_path, "replay", "latest", "--step", "0")
    assert replayed.returncode == 0 and json.loads(replayed.stdout)["bitwise_equal"], replayed.stderr
    audited = command(tmp_path, "audit", "latest")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 1 and report["max_abs_dlp"] == 0.0
    acted = command(tmp_path, "trajectories", "latest")
    print(acted.stdout[-1500:], acted.stderr[-500:])
