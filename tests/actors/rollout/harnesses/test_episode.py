"""Attempts in which a harness acts: bus, rollout actor, sandbox with its endpoint, judge."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.config import Policy
from headrace.harnesses import bundles
from headrace.harnesses.programs import KNOWN
from headrace.messages.judging import Score
from headrace.messages.rollout import HarnessEnd, Limits, Sampling, Trajectory
from headrace.messages.training import BatchGroup, StepManifest
from headrace.policy import routes
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer
from tests.conftest import Connect
from tests.support import small_harness
from tests.support.chat_formats import tokenizer_json
from tests.support.client_engine import Said
from tests.support.harness_images import CACHE
from tests.support.harness_run import fixes, harness_run
from tests.support.records import of
from tests.support.world import CONFIG

pytestmark = pytest.mark.anyio

DONE: Said = ("Fixed.", [])


async def test_a_harness_fixes_a_bug_and_is_judged(connect: Connect, tmp_path: Path) -> None:
    own = small_harness.program(tmp_path / "bundle")
    bundles.make(tmp_path / "cache", own)
    cache = tmp_path / "cache"
    async with harness_run(connect, tmp_path, "h1", "small", [fixes(), DONE], own=own, cache=cache) as run:
        made = await run.attempt()
        assert isinstance(made, Trajectory), made
        assert made.outcome == "finished" and [turn.index for turn in made.turns] == [0, 1], made
        assert made.plugins[-1].name == "small" and made.touched == ()
        assert (await run.score()).verdict == "passed"


ATTEMPTS = 20
SHAPE = Policy(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_dim=32, vocab=512)
SMALL = Limits(max_turns=5, max_tokens=200, context_tokens=4096)


def prepared(folder: Path, attempts: int) -> PolicyTrainer:
    """A trainer whose batch is one group, and which scores all of it again."""
    config = msgspec.structs.replace(
        CONFIG,
        policy=SHAPE,
        curriculum=msgspec.structs.replace(CONFIG.curriculum, group_size=attempts, groups_per_step=1),
        trainer=msgspec.structs.replace(CONFIG.trainer, rescore=attempts),
    )
    return PolicyTrainer.prepare(config, folder / "trainer", tokenizer_json=tokenizer_json(), traces=tuple)


def trained(trainer: PolicyTrainer, made: Sequence[Trajectory]) -> StepOutcome:
    """The outcome of a step on a group of attempts."""
    slots = tuple((1 + slot, 1001 + slot) for slot in range(len(made)))
    manifest = of(
        StepManifest,
        run=made[0].run,
        step=0,
        version=0,
        groups=(BatchGroup(group="g", close_seq=1, slots=slots),),
        fingerprint=trainer.numerics.fingerprint,
    )
    scores = {
        1001 + slot: of(
            Score, run=each.run, group="g", slot=slot, task=each.task, reward=float(slot % 2), passed=slot % 2 > 0
        )
        for slot, each in enumerate(made)
    }
    return trainer.step(manifest, dict(enumerate(made, 1)), scores)


async def test_every_conversation_is_recorded_exactly_and_trained(connect: Connect, tmp_path: Path) -> None:
    """A title, a rewritten history and a limit: three segments, whose tokens are those that the policy said."""
    trainer = prepared(tmp_path, 2)
    own = small_harness.program(tmp_path / "bundle")
    bundles.make(tmp_path / "cache", own)
    does = ("title", "forever", "rewrite")
    async with harness_run(
        connect,
        tmp_path,
        "h2",
        "small",
        [],
        own=own,
        cache=tmp_path / "cache",
        policy=(SHAPE, trainer.state.model.state()),
        arguments=does,
    ) as run:
        sampling = Sampling(max_turn_tokens=8)
        made = [await run.attempt(slot, limits=SMALL, sampling=sampling) for slot in range(2)]
        logged = [await run.turns(f"g-{slot}-0") for slot in range(2)]
        for each in made:
            assert isinstance(each, Trajectory) and isinstance(each.harness, HarnessEnd), each
            assert each.outcome == "max_turns" and len(each.turns) == 5
            assert [turn.segment for turn in each.turns] == [0, 1, 1, 2, 2]
            assert (each.harness.requests, each.harness.rewritten) == (6, 1)

    records = [
        msgspec.structs.replace(each, turns=routes.filled(each.turns, logged[number]))
        for number, each in enumerate(made)
        if isinstance(each, Trajectory)
    ]
    outcome = trained(trainer, records)
    assert not outcome.failed, outcome.detail
    assert outcome.max_abs_dlp == 0.0 and outcome.rescored_tokens > 0
    sampled = sum(len(turn.ids) for each in records for turn in each.turns)
    assert outcome.tokens == sampled


@pytest.mark.clients
@pytest.mark.timeout(900)
async def test_twenty_attempts_of_mini_swe_agent_are_scored_again_to_the_bit(connect: Connect, tmp_path: Path) -> None:
    """An untrained policy answers it: it complains of the format, and asks again."""
    assert bundles.find(CACHE, KNOWN["mini-swe-agent"]), "make its bundle: headrace harness mini-swe-agent"
    trainer = prepared(tmp_path, ATTEMPTS)
    policy = (SHAPE, trainer.state.model.state())
    async with harness_run(connect, tmp_path, "h3", "mini-swe-agent", [], policy=policy) as run:
        sampling, limits = Sampling(max_turn_tokens=8), Limits(max_turns=3, max_tokens=999, context_tokens=8192)
        records = []
        for slot in range(ATTEMPTS):
            each = await run.attempt(slot, limits=limits, sampling=sampling)
            assert isinstance(each, Trajectory), each
            logged = await run.turns(f"g-{slot}-0")
            records.append(msgspec.structs.replace(each, turns=routes.filled(each.turns, logged)))
    outcome = trained(trainer, records)
    assert not outcome.failed, outcome.detail
    sampled = sum(len(turn.ids) for each in records for turn in each.turns)
    assert (outcome.max_abs_dlp, outcome.rescored_tokens, outcome.tokens) == (0.0, sampled, sampled)
