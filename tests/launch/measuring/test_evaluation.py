"""`headrace eval`: the tokenizer comes from the run's own folder, and without one nothing is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config
from headrace.launch.measuring import evaluation
from headrace.launch.processes import Run
from headrace.launch.runs import RunDir, RunError
from headrace.rendering import schemas
from headrace.rendering.tokenizer import Tokenizer
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


async def test_a_policy_is_read_with_its_own_tokenizer_or_not_at_all(
    server: Server, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "moved" / "r1", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    run = cast(Run, SimpleNamespace(folder=RunDir(folder), broker=server, config=Config()))
    with pytest.raises(RunError, match="cannot be evaluated without its tokenizer"):
        await evaluation.ensure_bundle(run)
    text = Tokenizer.train((), 256 + len(schemas.tags())).dump()
    (folder / "tokenizer.json").write_text(text)
    await evaluation.ensure_bundle(run)
    bundle = await renderer_bundles.fetch(await connect("rollout"), "r1")
    assert bundle is not None and bundle.tokenizer_json == text
