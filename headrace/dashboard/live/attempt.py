"""One attempt for the live page: turns as text, results, a unified diff, its score, and the command that repeats it."""

import difflib
from collections.abc import Callable, Mapping, Sequence

import msgspec
from tokenizers import Tokenizer

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.payloads import renderer_bundles
from headrace.errors import HeadraceError
from headrace.messages import subjects as s
from headrace.messages.judging import Score
from headrace.messages.rollout import ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import EngineMismatch, StepDone, TokenGap, TokenGaps
from headrace.vmhost.guest.lines import shown_lines

Originals = Callable[[TaskRef], Mapping[str, bytes]]
"""The files of a task as the agent got them; LookupError when the suite is not here."""
SHOWN_TOKENS = 4000


class NoSuchAttempt(HeadraceError):
    """There is no such trajectory, or the request may not read it; the text is one sentence."""


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an attempt."""

    index: int
    segment: int
    kind: str
    stop: str
    sampled: int
    versions: list[int]
    mean_logprob: float | None
    tokens: list[tuple[str, float]]
    """Text and log-probability of the first `SHOWN_TOKENS` sampled tokens."""
    gaps: list[float] | None
    """Trainer minus sampler for the first of these tokens; empty where every gap of the attempt is 0, None where it
    was not scored again."""
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]


class FileDiff(msgspec.Struct, frozen=True):
    """The unified diff of one file, without its two head lines."""

    path: str
    lines: list[str]


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows of an attempt."""

    id: str
    seq: int
    lane: str
    task: TaskRef
    family: str
    outcome: str
    backend: str
    isolation: str
    wall_s: float
    versions: list[int]
    sampled_tokens: int
    prompt: str
    turns: list[TurnView]
    diff: list[FileDiff]
    touched: list[str]
    score: Score | None
    parts: list[tuple[str, str]]
    """Parts of the reward that are on record, and figures behind them: name and value. A rubric's criteria with the
    judge's reasons are in `score`."""
    step: int | None
    mismatch: EngineMismatch | None
    """Of the step that trained it, for the engine that sampled it."""
    command: str
    """Repeats the attempt."""


async def find(bus: Bus, run: str, seq: int) -> Trajectory:
    """The trajectory with a sequence. NoSuchAttempt."""
    try:
        received = await bus.get("HR_TRAJ", seq)
        message = received.message
    except (MessageGone, ValueError):
        raise NoSuchAttempt(f"attempt {seq} is not stored any more: [replay] keep_steps decides for how long") from None
    if not isinstance(message, Trajectory) or message.run != run:
        raise NoSuchAttempt(f"record {seq} of HR_TRAJ is not an attempt of run {run}")
    return message


async def describe(bus: Bus, run: str, seq: int, made: Trajectory, originals: Originals) -> AttemptView:
    """Everything that the page shows of an attempt."""
    bundle = await renderer_bundles.fetch(bus, run)
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json) if bundle is not None else None
    score = await _score(bus, run, made, seq)
    step = await _step(bus, run, made)
    gaps = by_turn(made, await _gap(bus, run, made) if step is not None else None)
    try:
        before = dict(originals(made.task)) if made.lane != "production" else {}
    except LookupError:
        before = {}
    engine = next((each for each in step.engines if each.engine == made.rollout), None) if step else None
    return AttemptView(
        id=made.id,
        seq=seq,
        lane=made.lane,
        task=made.task,
        family=made.family,
        outcome=made.outcome,
        backend=made.backend,
        isolation=made.isolation,
        wall_s=made.wall_s,
        versions=sorted({span.version for turn in made.turns for span in turn.spans}),
        sampled_tokens=sum(len(turn.ids) for turn in made.turns),
        prompt=_text(tokenizer, list(made.turns[0].prompt_ids.tolist())) if made.turns else "",
        turns=[_turn(turn, tokenizer, of) for turn, of in zip(made.turns, gaps, strict=True)],
        diff=_diff(before, made),
        touched=list(made.touched),
        score=score,
        parts=_parts(score),
        step=step.step if step is not None else None,
        mismatch=engine,
        command=f"headrace replay {run} --trajectory {made.id}",
    )


async def _score(bus: Bus, run: str, made: Trajectory, seq: int) -> Score | None:
    score: Score | None = None
    async for received in bus.history("HR_SCORE", s.SCORE.where(run=run, group=made.group)):
        if isinstance(received.message, Score) and received.message.trajectory_seq == seq:
            score = received.message
    return score


async def _step(bus: Bus, run: str, made: Trajectory) -> StepDone | None:
    if made.lane != "train":
        return None
    done: StepDone | None = None
    async for received in bus.history("HR_STEP", s.STEP.at(run=run)):
        if isinstance(received.message, StepDone) and made.group in received.message.groups:
            done = received.message
    return done


async def _gap(bus: Bus, run: str, made: Trajectory) -> TokenGap | None:
    newest: TokenGap | None = None
    async for received in bus.history("HR_EVENT", s.EVENT.where(run=run, actor="trainer", type=TokenGaps.type_name)):
        if isinstance(received.message, TokenGaps):
            newest = next((gap for gap in received.message.of if gap.trajectory == made.id), newest)
    return newest


def by_turn(made: Trajectory, gap: TokenGap | None) -> list[list[float] | None]:
    """The gaps of each turn's sampled tokens. The trainer's batch has the turns of a segment after each other."""
    if gap is None:
        return [None] * len(made.turns)
    values = [float(value) for value in gap.gaps.tolist()] if gap.gaps is not None else []
    placed: list[list[float] | None] = [[] for _ in made.turns]
    at = 0
    for place in sorted(range(len(made.turns)), key=lambda place: made.turns[place].segment):
        sampled = len(made.turns[place].ids)
        of_turn = values[at : at + sampled][:SHOWN_TOKENS]
        placed[place] = of_turn if of_turn or not values else None  # the record ends before this turn
        at += sampled
    return placed


def _parts(score: Score | None) -> list[tuple[str, str]]:
    """The parts of a reward that are on record."""
    if score is None:
        return []
    passed = sum(test.outcome == "passed" for test in score.tests)
    turns = ", ".join(f"{reward:g}" for reward in score.turn_rewards)
    return [
        *((f"part: {name}", f"{value:+g}") for name, value in score.parts.items()),
        ("hidden tests", f"{passed} of {len(score.tests)} passed"),
        *([("rewards of turns", turns)] if turns else []),
        ("sampled tokens", str(score.sampled_tokens)),
        *([("computed by", f"{plugin.name} {plugin.version}") for plugin in score.plugins]),
    ]


def _text(tokenizer: Tokenizer | None, ids: Sequence[float]) -> str:
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)
    return text


def _turn(turn: Turn, tokenizer: Tokenizer | None, gaps: list[float] | None) -> TurnView:
    ids, logprobs = turn.ids.tolist(), turn.logprobs.tolist()
    pairs = list(zip(ids, logprobs, strict=False))[:SHOWN_TOKENS]
    return TurnView(
        index=turn.index,
        segment=turn.segment,
        kind=turn.kind,
        stop=turn.stop,
        sampled=len(ids),
        versions=sorted({span.version for span in turn.spans}),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        tokens=[(_text(tokenizer, [id]) or f"‹{int(id)}›", logprob) for id, logprob in pairs],
        gaps=gaps,
        calls=turn.calls,
        results=turn.results,
    )


def _diff(before: Mapping[str, bytes], made: Trajectory) -> list[FileDiff]:
    """A unified diff per changed file; the whole file where its original is not here."""
    changed: dict[str, bytes | None] = {**made.diff, **dict.fromkeys(made.deleted)}
    out = []
    for path, data in sorted(changed.items()):
        old, new = shown_lines(before.get(path, b"")), shown_lines(data or b"")
        lines = difflib.unified_diff(old, new, "before" if path in before else "(not known)", path, lineterm="")
        out.append(FileDiff(path + (" (deleted)" if data is None else ""), list(lines)[2:]))
    return out
