"""Traces of work with self-summaries on the tasks of notes.py: the warm start of a policy that has to choose.

A document is one segment: what the policy reads in it, its call, and the summary that ends it. A summary carries the
fact that the next turn needs (a file's name, then the code) and one of the marked values. A `quality` share of the
traces keeps the right value; the others keep one of the four at random. With `quality` = 0 a policy that copies well
answers 1/4 + 3/4 x 1/8 = 0.344 of the tasks, whichever mark is right.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.messages.rollout import ToolCall, ToolResult
from headrace.tasks.generated import notes
from headrace.tasks.generated.traces import Answer, Call, Encoder, Fault, Trace, TracedTurn, TraceFormat
from headrace.tasks.local import LocalFiles


class Words(Protocol):
    """The part of a tokenizer that traces with summaries need."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""


class Summariser(Encoder, Protocol):
    """The part of a renderer that traces with summaries need."""

    @property
    def tokenizer(self) -> Words:
        """The policy's tokenizer."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a turn; the first one ends a summary here."""


class NoteSegment(NamedTuple):
    """A segment: the summary that it starts from, one call with its result, and the summary that ends it."""

    before: str
    call: Call
    results: tuple[ToolResult, ...]
    after: str
    """Empty in the last segment."""


def segments(made: notes.Made, value: int, answer: Answer) -> list[NoteSegment]:
    """The three segments of an episode that keeps `value`."""
    sandbox = LocalFiles(made.task.files)

    def run(name: str, arguments: dict[str, str]) -> tuple[ToolResult, ...]:
        return tuple(answer(made.task, sandbox, (ToolCall(id="0.0", name=name, arguments=arguments),)))

    first, second = ({"path": path} for path in (notes.START, made.name))
    edit = {"path": notes.ANSWER_FILE, "lines": "2", "text": notes.line(made.code, value)}
    first_note, coded = f"{made.name} {value}", f" {made.code} {value}"
    return [
        NoteSegment("", ("read_file", first), run("read_file", first), first_note),
        NoteSegment(first_note, ("read_file", second), run("read_file", second), coded),
        NoteSegment(coded, ("edit_file", edit), (), ""),
    ]


def _plays(seed: int, quality: float, answer: Answer) -> Iterator[tuple[notes.Made, list[NoteSegment], Fault]]:
    rng = random.Random(f"headrace/note-traces/{seed}")
    seeds = notes.SEEDS["notes"]
    while True:
        made = notes.make("notes", rng.randrange(seeds.start, seeds.stop))
        fault: Fault = "" if rng.random() < quality else "random"
        value = made.values[notes.KEY] if not fault else rng.choice(made.values)
        yield made, segments(made, value, answer), fault


def written(form: Summariser, text: str) -> list[int]:
    """A summary as a policy writes it."""
    return [*form.tokenizer.encode(text), form.stop_ids[0]]


def encoded(form: Summariser, part: NoteSegment, context: float) -> tuple[list[int], list[float]]:
    """Ids and loss weights of a segment; `context` is the weight of what is read."""
    ids = form.prompt(notes.PROMPT, written(form, part.before) if part.before else ())
    acted = form.turn([part.call])
    weights = [0.0, *[context] * (len(ids) - 1), *[1.0] * len(acted)]
    ids = ids + acted
    if part.after:
        name, arguments = part.call
        turn = TracedTurn((ToolCall(id="0.0", name=name, arguments=arguments),), part.results, taught=True)
        read = form.delta([turn], stopped=acted[-1], summary=True)
        summary = written(form, part.after)
        ids += [*read, *summary]
        weights += [context] * len(read) + [1.0] * len(summary)
    return ids, weights


def mid_training_texts(seed: int, quality: float, form: Summariser, answer: Answer, context: float) -> Iterator[Trace]:
    """Segments without an end, those of one episode in order. Arguments as in traces.mid_training_texts."""
    for made, parts, fault in _plays(seed, quality, answer):
        for part in parts:
            ids, weights = encoded(form, part, context)
            yield Trace(ids=ids, weights=weights, family=made.task.family, fault=fault, solved=not fault)


def tokenizer_texts(seed: int, count: int, form: TraceFormat, answer: Answer) -> Iterator[str]:
    """Texts to train a tokenizer on: everything between the tags of `count` episodes."""
    for (_, parts, _), _ in zip(_plays(seed, 1.0, answer), range(count), strict=False):
        for part in parts:
            pieces = form.prompt_pieces(notes.PROMPT, part.before) + form.turn_pieces([part.call])
            for text, is_tag in [*pieces, *form.result_pieces(part.results), (part.after, False)]:
                if not is_tag and text:
                    yield text
