"""Long ones: 100,000 tokens and 200 tool calls with routed experts, in a group of 128, through every part that is not
the sandbox: bus, turn log, packing, a trainer's step, audit and replay."""

from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
import torch

from headrace.actors.rollout.turn_log import TurnLog
from headrace.actors.trainer.actor import Trainer
from headrace.algorithms.packing import pack
from headrace.bus.storing import MAX_INLINE
from headrace.config import Config, Curriculum, Policy
from headrace.config import Trainer as TrainerSection
from headrace.messages.base import Array
from headrace.messages.codec import encode
from headrace.messages.ledger import ClosedSlot
from headrace.messages.rollout import Span, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.subjects import CLOSE, EVENT, LEDGER, SCORE, STEP, TRAJ
from headrace.messages.training import StepDone
from headrace.policy import scoring
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.replay.audit import prove
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.training.batches.micro_batch import micro_batches
from headrace.weights import tensor_state
from tests.conftest import Connect
from tests.support import records as r
from tests.support import world
from tests.support.actors import living
from tests.support.records import of
from tests.support.segments import segments_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROUP, SEGMENTS, TURNS, PROMPT, SAMPLED = 128, 25, 8, 400, 100
SECTION = Policy(
    dim=16, layers=4, heads=1, kv_heads=1, head_dim=16, experts=8, top_k=4, expert_dim=16, vocab=world.VOCAB
)
POLICY = hugging_face.from_section(SECTION)
NUMERICS = probe(POLICY)
MICRO = 8192


def config(folder: Path) -> Config:
    run_keys: dict[str, Any] = {"dir": str(folder)}
    return msgspec.structs.replace(
        world.CONFIG,
        run=msgspec.structs.replace(world.CONFIG.run, **run_keys),
        policy=SECTION,
        curriculum=Curriculum(group_size=GROUP, groups_per_step=1, staleness=1, steps=1),
        trainer=TrainerSection(threads=1, rescore=GROUP, micro_tokens=MICRO),
    )


def episode(model: Model, run: str, slot: int, segments: int, turns: int, prompt: int, sampled: int) -> Trajectory:
    """Random ids, with the log-probabilities and routes that the exact recipe gives them; a call in every turn."""
    draw = torch.Generator().manual_seed(slot)
    made: list[Turn] = []
    length = prompt + sampled
    for segment in range(segments):
        ids = torch.randint(10, world.VOCAB, (turns * length,), generator=draw)
        cuts = [(max(0, t * length - 1), (t + 1) * length - 1) for t in range(turns)]  # positions that a turn forwards
        spans = [Span(start, end, 0) for start, end in cuts]
        targets = [t * length + prompt + n for t in range(turns) for n in range(sampled)]
        routes: list[torch.Tensor] = []
        logprobs = scoring.score({0: model}, ids, spans, targets, 1.0, recorder=routes)
        rows = torch.cat(routes).to(torch.uint8)
        for turn, (start, end) in enumerate(cuts):
            index, at = len(made), turn * length
            name = f"{index}.0"
            made.append(
                Turn(
                    index=index,
                    segment=segment,
                    prompt_ids=Array.of(ids[at : at + prompt].tolist(), "<i4"),
                    ids=Array.of(ids[at + prompt : at + length].tolist(), "<i4"),
                    logprobs=Array.of(logprobs[turn * sampled : (turn + 1) * sampled].tolist(), "<f4"),
                    routed=Array("|u1", (end - start, POLICY.layers, POLICY.top_k), rows[start:end].numpy().tobytes()),
                    spans=(Span(start, end, 0),),
                    calls=(ToolCall(id=name, name="read_file", arguments={"path": "a.py"}),),
                    results=(ToolResult(call_id=name, ok=True, output="x" * 80),),
                )
            )
    issued = r.issued("g000000", slot, size=GROUP, run=run)
    return msgspec.structs.replace(r.trajectory(issued), turns=tuple(made), fingerprint=NUMERICS.fingerprint)


async def test_a_trajectory_of_100_000_tokens_in_a_group_of_128(connect: Connect, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run, admin = f"r{token_hex(4)}", await connect()
    folder = tmp_path / run
    folder.mkdir()
    (folder / "tokenizer.json").write_text(world.TOKENIZER)
    async with living(Trainer, config(tmp_path), await connect("trainer"), run):
        model = Model(POLICY, NUMERICS, seed=None)
        async for received in admin.follow("HR_EVENT", EVENT.where(run=run, actor="trainer", type="snapshot_ready")):
            model.load_state(tensor_state.read(received.message.path))
            break
        long = episode(model, run, 0, SEGMENTS, TURNS, PROMPT, SAMPLED)
        assert sum(len(turn.prompt_ids) + len(turn.ids) for turn in long.turns) == 100_000
        assert sum(len(turn.calls) for turn in long.turns) == 200

        # Resume: a successor finds all of it in the turn log.
        rollout = await connect("rollout")
        log = TurnLog(rollout, run, "g000000", long.id)
        for turn in long.turns:
            await log.sampled(msgspec.structs.replace(turn, results=()), "node", "box", NUMERICS.fingerprint)
            await log.done(turn.index, turn.results)
        await log.flush()
        assert (await TurnLog(rollout, run, "g000000", long.id).read()).turns == long.turns

        # Packing: nothing is cut, nothing over the budget unless it is longer than the budget itself.
        segments = segments_of(long, 0.5)
        assert len(segments) == SEGMENTS
        packed = micro_batches(segments, MICRO, POLICY)
        assert sorted(len(s.ids) for part in packed for s in part) == sorted(len(s.ids) for s in segments)
        assert max(sum(len(s.ids) for s in part) for part in packed) <= MICRO
        assert [len(part) for part in pack([100_000, 5, 5], MICRO)] == [1, 2]

        # The bus: a claim check there and back, bit for bit.
        assert len(encode(long)[0]) > MAX_INLINE
        closed: list[ClosedSlot] = []
        for slot in range(GROUP):
            made = long if slot == 0 else episode(model, run, slot, 1, 2, 3, 2)
            await admin.publish(LEDGER.at(run=run, group="g000000"), r.issued("g000000", slot, size=GROUP, run=run))
            seq = await admin.publish(TRAJ.at(run=run, group="g000000"), made)
            score = r.score("g000000", slot, trajectory_seq=seq, passed=slot % 2 == 0, run=run)
            at = await admin.publish(SCORE.at(run=run, judge="j1", group="g000000"), score)
            closed.append(of(ClosedSlot, slot=slot, trajectory_seq=seq, score_seq=at, reward=score.reward))
        assert (await admin.get("HR_TRAJ", closed[0].trajectory_seq)).message == long

        # The step, exact over every trajectory of the group.
        ending = msgspec.structs.replace(r.closed("g000000", size=GROUP, run=run), slots=tuple(closed))
        await admin.publish(CLOSE.at(run=run, group="g000000"), ending)
        async for received in admin.follow("HR_STEP", STEP.at(run=run)):
            if isinstance(received.message, StepDone):
                done = received.message
                break
    assert (done.trained_slots, done.tokens) == (GROUP, SEGMENTS * TURNS * SAMPLED + (GROUP - 1) * 4)
    assert (done.max_abs_dlp, done.rescored_tokens, done.exact) == (0.0, done.tokens, True)
    assert abs(done.k1) < 1e-6

    report, wrong = await prove(await connect("operator"), run)
    assert wrong == []
    assert (report.issued, report.trained, report.attempts.kept) == (GROUP, GROUP, GROUP)
    recorded = await of_run(await connect("replay"), config(tmp_path), folder, run)
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, [0])] == [True]
