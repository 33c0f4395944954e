"""Two rollout actors at the same turn of a client: the one that loses keeps nothing of it in its engine."""

from pathlib import Path
from typing import Any

import pytest

from headrace.actors.rollout import spans
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.client_turns import trajectory_of
from headrace.bus.payloads import renderer_bundles
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.product import ClientMessage, ClientTurn
from headrace.messages.subjects import TURN
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights import tensor_state
from tests.actors.rollout.test_client_turns import SHAPE, config
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.chat_formats import bundle_of_run
from tests.support.staged import stage

pytestmark = pytest.mark.anyio
NEWER = {"Hr-Type": "turn_sampled/9"}
"""A record that another actor writes and this version cannot read."""


@pytest.mark.parametrize("conflicts", [1, 2])
async def test_a_turn_that_another_actor_recorded_leaves_no_session_in_the_engine(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conflicts: int
) -> None:
    """Before, such a session was forgotten without the engine, which kept its keys and values until it ended."""
    run, group = f"cc{conflicts}", f"{'a' * 20}.s1"
    await renderer_bundles.publish(await connect("trainer"), run, bundle_of_run("hermes"))
    shape, file = hugging_face.from_section(SHAPE), tmp_path / "0.safetensors"
    state_hash = tensor_state.write(file, Model(shape, probe(shape), seed=3).state())
    await stage(await connect("admin"), run, "n1", 0, str(file), state_hash)
    other = await connect("rollout", node="n2")
    sample, left = spans.sample, conflicts

    async def raced(engine: Any, request: Any, trajectory: str) -> Any:
        nonlocal left
        sampled = await sample(engine, request, trajectory)
        if left:
            left -= 1
            await other.publish_raw(TURN.at(run=run, trajectory=trajectory_of(group)), b"\x80", NEWER)
        return sampled

    monkeypatch.setattr(spans, "sample", raced)
    turn = ClientTurn(run=run, group=group, messages=(ClientMessage(role="user", text="hi"),), context_tokens=2048)
    async with living(Rollout, config(tmp_path), await connect("rollout", node="n1"), run, "product") as actor:
        done = await actor._clients.turn(turn)
        engine = actor._policies.engine
        assert isinstance(engine, EmbeddedEngine) and not left
        assert ("at the same time" in done.failed) == (conflicts == 2)
        assert engine.stats()["sessions"] == len(actor._clients._sessions) == 2 - conflicts
