"""Traces to mid-train on: scripted play on real generated repositories, mostly imperfect on purpose.

Idea: a policy made from nothing has to learn the format, the tools and how broken functions look before reinforcement
has anything to reinforce. A `quality` share of the traces is played well; the others carry one planted fault (it quits,
edits a file that it has not read, or leaves a wrong change), so that RL has something to take away. The report of a run
says so. Results are not written by the script: every call runs on the repository and is answered by the same tool code
as in an episode. Multi-line functions are drawn more often than the suites draw them, because they are harder to learn
by an order of magnitude.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task
from headrace.tasks.generated import repositories
from headrace.tasks.local import LocalFiles
from headrace.vmhost.guest.lines import bodies

Call = tuple[str, dict[str, str]]
Piece = tuple[str, bool]
Answer = Callable[[Task, Sandbox, Sequence[ToolCall]], list[ToolResult]]
Fault = Literal["", "quits", "unread", "wrong", "careless", "random"]

MULTI_LINE = 0.72
"""Share of multi-line functions in traces, `[mid_training] multi_line` by default; the suites have 0.5."""

_LATE = 0.2
"""Share of quitters that have at least searched; the others are the shortest of traces."""

RETRIES = 0.25
"""Share of good traces that first make a wrong edit, see a test fail, and look again. The wrong turn has no loss.
`[mid_training] retries` by default."""

CONTEXT = 0.05
"""Loss weight of what a policy reads: it need not learn to write repositories (0.25 cost it a seventh of its multi-line
tasks after the same tokens). `[mid_training] context_weight` by default."""


class TraceFormat(Protocol):
    """The pieces of an episode in the terse format (rendering.terse.Format), on which a tokenizer is trained."""

    def prompt_pieces(self, task_prompt: str, summary: str = "") -> list[Piece]:
        """The start of an episode."""

    def turn_pieces(self, calls: Sequence[Call], thought: str = "") -> list[Piece]:
        """A turn as a policy writes it."""

    def result_pieces(self, results: Sequence[ToolResult], closed: bool = True) -> list[Piece]:
        """The answers to a turn."""


class Encoder(Protocol):
    """The part of a renderer (rendering.base.Renderer) that traces need."""

    @property
    def parallel(self) -> bool:
        """Whether one turn may hold several calls."""

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """The start of an episode."""

    def turn(self, calls: Sequence[Call], thought: str = "", *, before: int = 0) -> list[int]:
        """A turn as a policy writes it. before: calls made earlier."""

    def delta(self, history: Sequence["TracedTurn"], *, stopped: int | None, summary: bool = False) -> list[int]:
        """The answers to the last turn of the history."""


class TracedTurn(NamedTuple):
    """One turn of a trace; the last one has no results."""

    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    taught: bool
    """Whether it is learned as the policy's own; else it is only shown, like something read."""

    def singles(self) -> list["TracedTurn"]:
        """The same calls in turns of one each."""
        return [TracedTurn((call,), self.results[at : at + 1], self.taught) for at, call in enumerate(self.calls)]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One document. `weights[i]` is the loss weight of predicting ids[i]: 1 for what a policy writes, `context` for
    what it reads, 0 for the first token."""

    ids: list[int]
    weights: list[float]
    family: str
    fault: Fault
    solved: bool


class Play:
    """One trace in the making."""

    def __init__(self, made: repositories.Made, answer: Answer) -> None:
        self.made, self._answer = made, answer
        self.sandbox = LocalFiles(made.task.files)
        self.turns: list[TracedTurn] = []

    def turn(self, *calls: Call, taught: bool = True) -> list[ToolResult]:
        """Write a turn and read its results. Not `taught`: the turn is shown, as if it had been read."""
        sent = tuple(
            ToolCall(id=f"{len(self.turns)}.{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(calls)
        )
        finishes = any(name == "finish" for name, _ in calls)
        results = [] if finishes else self._answer(self.made.task, self.sandbox, sent)
        self.turns.append(TracedTurn(sent, tuple(results), taught))
        return results

    def encoded(self, form: Encoder, context: float) -> tuple[list[int], list[float]]:
        """Ids and loss weights; `context` is the weight of what is read."""
        turns = self.turns if form.parallel else [single for turn in self.turns for single in turn.singles()]
        ids = form.prompt(self.made.task.prompt)
        weights = [context] * len(ids)
        calls = 0
        for index, turn in enumerate(turns):
            written = form.turn([(call.name, call.arguments) for call in turn.calls], before=calls)
            ids += written
            weights += [1.0 if turn.taught else context] * len(written)
            calls += len(turn.calls)
            if turn.results:
                read = form.delta(turns[: index + 1], stopped=written[-1])
                ids += read
                weights += [context] * len(read)
        return ids, weights

    def pieces(self, form: TraceFormat) -> Iterator[Piece]:
        """The whole trace in the terse format."""
        yield from form.prompt_pieces(self.made.task.prompt)
        for turn in self.turns:
            yield from form.turn_pieces([(call.name, call.arguments) for call in turn.calls])
            if turn.results:
                yield from form.result_pieces(turn.results)


FINISH: Call = ("finish", {})
TEST: Call = ("run_tests", {})


def wrong_line(made: repositories.Made, rng: random.Random) -> Call:
    """A change that does not mend: another wrong alternative, the line as it is, or a neighbouring line."""
    module = bodies(made.task.files[made.path])
    others = [bug for bug in made.target.template.bugs if bug[0] == made.bug[0] and bug != made.bug]
    if others and rng.random() < 0.6:
        text = made.target.source(rng.choice(others))[1 + made.bug[0]]
        return edit_line(made.path, made.line, text)
    start = made.line - made.bug[0]
    line = rng.randrange(start, start + len(made.target.template.body))
    return edit_line(made.path, line, module[line - 1])


def edit_line(path: str, line: int, text: str) -> Call:
    """The call that replaces one line."""
    return ("edit_file", {"path": path, "lines": str(line), "text": text})


def unread(made: repositories.Made, rng: random.Random) -> Call:
    """An edit made up without a look: some module, some line, a line of some function."""
    path = rng.choice([p for p in made.task.files if p.endswith(".py") and "/" in p and made.task.files[p]])
    lines = bodies(made.task.files[path])
    line = rng.randrange(2, len(lines) + 1)
    return edit_line(path, line, rng.choice(made.target.source()[1:]))


def play(made: repositories.Made, fault: Fault, rng: random.Random, answer: Answer, retries: float = RETRIES) -> Play:
    """One trace of a policy that searches once and edits."""
    game = Play(made, answer)
    find: Call = ("search", {"query": f"def {made.target.name}"})
    right = edit_line(made.path, made.line, made.fixed)
    if fault == "quits":
        if rng.random() < _LATE:
            game.turn(find)
        game.turn(FINISH)
        return game
    if fault == "unread":
        game.turn(unread(made, rng), TEST)
        game.turn(FINISH)
        return game
    game.turn(find)
    if fault == "wrong":
        game.turn(wrong_line(made, rng), TEST)
        game.turn(FINISH)
    elif fault == "careless":
        game.turn(wrong_line(made, rng), FINISH)
    elif rng.random() < retries:
        game.turn(wrong_line(made, rng), TEST, taught=False)
        game.turn(find)
        game.turn(right, TEST)
        game.turn(FINISH)
    else:
        game.turn(right, TEST)
        game.turn(FINISH)
    return game


FAULTS: tuple[Fault, ...] = ("quits",) * 8 + ("unread", "wrong", "careless")
"""The faults that a faulty trace draws from. Mostly quitting: it is short, so most tokens still teach how to work, and
a policy unlearns it within a few steps; wrong changes cost it what it knows about the function (measured: greedy 0.61
on tasks with equal shares, 0.85 with five to one, after 1.2 M tokens)."""


def _plays(
    seed: int,
    quality: float,
    answer: Answer,
    faults: Sequence[Fault] = FAULTS,
    multi_line: float = MULTI_LINE,
    broad: float = 0.0,
    retries: float = RETRIES,
) -> Iterator[tuple[Play, Fault]]:
    rng = random.Random(f"headrace/traces/{seed}")
    seeds = repositories.SEEDS["train"]
    while True:
        kind = "broad" if broad and rng.random() < broad else "train"
        made = repositories.make(kind, rng.randrange(seeds.start, seeds.stop), multi_line, judged=False)
        fault = "" if rng.random() < quality else rng.choice(faults)
        yield play(made, fault, rng, answer, retries), fault


def mid_training_texts(
    seed: int,
    quality: float,
    form: Encoder,
    answer: Answer,
    context: float = CONTEXT,
    *,
    faults: Sequence[Fault] = FAULTS,
    multi_line: float = MULTI_LINE,
    broad: float = 0.0,
    retries: float = RETRIES,
) -> Iterator[Trace]:
    """Traces without an end. `form` is the policy's renderer, `answer` runs calls (harness.sync_tools.answer), `broad`
    is the share of traces on functions that no suite has (composed/, broad_templates.py)."""
    for game, fault in _plays(seed, quality, answer, faults, multi_line, broad, retries):
        ids, weights = game.encoded(form, context)
        weights[0] = 0.0
        solved = game.sandbox.files.get(game.made.path) == game.made.oracle.solution[game.made.path]
        yield Trace(ids=ids, weights=weights, family=game.made.task.family, fault=fault, solved=solved)


def tokenizer_texts(seed: int, count: int, form: TraceFormat, answer: Answer) -> Iterator[str]:
    """Texts to train a tokenizer on: everything between the tags of `count` traces."""
    for (game, _), _ in zip(_plays(seed, 1.0, answer), range(count), strict=False):
        for text, is_tag in game.pieces(form):
            if not is_tag and text:
                yield text
