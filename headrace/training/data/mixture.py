"""Sources mixed by weight, cut into sequences; the position of all of them is one text that a checkpoint holds.

The next document comes from the source that has read the fewest tokens for its weight, so shares of tokens follow the
weights whatever the documents' lengths are. Each sequence is attended to alone: none sees another document.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from headrace.config import MidTraining
from headrace.training.data.base import DataError, Document
from headrace.training.data.index import Index


class Encoded(Protocol):
    """A document that something else made, such as a generated trace."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""

    @property
    def weights(self) -> list[float]:
        """One loss weight per id."""


class Source(Protocol):
    """Documents in an order that the seed decides."""

    name: str
    weight: float
    splits: bool
    digest: str

    def draw(self) -> Document | None:
        """The next document; None after the last epoch."""

    @property
    def drawn(self) -> tuple[int, int]:
        """Epoch, and documents drawn in it."""

    def seek(self, epoch: int, drawn: int) -> None:
        """Continue from there."""

    def held_out(self) -> Iterator[Document]:
        """Documents that are not trained on."""


class Files:
    """The documents of files, epoch after epoch."""

    def __init__(self, name: str, index: Index, *, weight: float, epochs: int, splits: bool, seed: int) -> None:
        """epochs: 0 never ends."""
        self.name, self.weight, self.splits = name, weight, splits
        self.digest = index.digest
        self._index, self._epochs = index, epochs
        self._key = f"headrace/data/{seed}/{name}"
        self._epoch = self._drawn = 0

    def draw(self) -> Document | None:
        """The next document that teaches a token. DataError when a whole epoch has none."""
        for _ in range(len(self._index)):
            if self._drawn == len(self._index):
                if self._epoch + 1 == self._epochs:
                    return None
                self._epoch, self._drawn = self._epoch + 1, 0
            document = self._index.document(self._epoch, self._drawn, self._key)
            self._drawn += 1
            if document.teaches:
                return document
        raise DataError(f"{self.name}: expected a document with a token to learn, got none in {len(self._index)}")

    @property
    def drawn(self) -> tuple[int, int]:
        """Epoch, and documents drawn in it."""
        return self._epoch, self._drawn

    def seek(self, epoch: int, drawn: int) -> None:
        """Continue from there."""
        self._epoch, self._drawn = epoch, drawn

    def held_out(self) -> Iterator[Document]:
        """Documents that are not trained on."""
        return self._index.held_out()


class Generated:
    """An endless iterator of traces that begins anew each time: continuing generates the earlier ones again."""

    def __init__(self, name: str, begin: Callable[[], Iterator[Encoded]], *, weight: float) -> None:
        self.name, self.weight, self.splits, self.digest = name, weight, False, ""
        self._begin = begin
        self._traces, self._drawn = begin(), 0

    def draw(self) -> Document | None:
        """The next trace."""
        trace = next(self._traces)
        self._drawn += 1
        return Document(ids=list(trace.ids), weights=list(trace.weights))

    @property
    def drawn(self) -> tuple[int, int]:
        """Always the first epoch."""
        return 0, self._drawn

    def seek(self, epoch: int, drawn: int) -> None:
        """Generate and skip."""
        self._traces, self._drawn = self._begin(), drawn
        for _ in range(drawn):
            next(self._traces)

    def held_out(self) -> Iterator[Document]:
        """None: traces are made anew, and evaluations measure what a policy does with other tasks."""
        return iter(())


class _At(msgspec.Struct, kw_only=True):
    """The position of one source."""

    epoch: int
    drawn: int
    tokens: int
    digest: str
    ended: bool = False


class _Position(msgspec.Struct, kw_only=True):
    sources: dict[str, _At]
    pending: str
    """The source whose last document is not finished; empty when all are."""
    offset: int
    """The first token of that document that was not given out as a target's context."""
    tokens: int


def phase(recipe: MidTraining, tokens: int) -> tuple[int, int]:
    """Longest sequence and tokens of a batch after so many tokens."""
    sequence, batch = recipe.sequence, recipe.batch_tokens
    for later in recipe.phases:
        if tokens >= later.start * recipe.tokens:
            sequence, batch = later.sequence, later.batch_tokens or batch
    return sequence, batch


class Mixture:
    """The sequences of a recipe's data, without an end unless all sources have their last epoch."""

    def __init__(
        self, sources: Sequence[Source], recipe: MidTraining, between: Callable[[], None] = lambda: None
    ) -> None:
        """between: called before each sequence; what it raises ends the iteration."""
        self._sources = {source.name: source for source in sources}
        self._recipe, self._between = recipe, between
        self._read = dict.fromkeys(self._sources, 0)
        self._ended: set[str] = set()
        self._pending: tuple[Source, Document] | None = None
        self._offset = self._tokens = 0

    def __iter__(self) -> Iterator[Document]:
        while (sequence := self._next()) is not None:
            yield sequence

    def _next(self) -> Document | None:
        """The next sequence."""
        while True:
            self._between()
            if self._pending is None and not self._draw():
                return None
            assert self._pending is not None
            source, document = self._pending
            length = phase(self._recipe, self._tokens)[0]
            begin, end = self._offset, min(self._offset + length, len(document.ids))
            part = Document(ids=document.ids[begin:end], weights=document.weights[begin:end])
            self._offset = end - 1  # the last token of a part is the first one of the next
            if end == len(document.ids) or not source.splits:
                self._pending = None
            targets = max(len(part.ids) - 1, 0)
            self._read[source.name] += max(targets, 1)
            self._tokens += targets
            if part.teaches:
                return part

    def _draw(self) -> bool:
        """Take the next document of the source that is furthest behind. False when all have ended."""
        while running := [source for name, source in self._sources.items() if name not in self._ended]:
            source = min(running, key=lambda source: self._read[source.name] / source.weight)
            document = source.draw()
            if document is not None:
                self._pending, self._offset = (source, document), 0
                return True
            self._ended.add(source.name)
        return False

    def position(self) -> str:
        """Where the iteration is, as JSON."""
        sources = {
            name: _At(
                epoch=source.drawn[0],
                drawn=source.drawn[1],
                tokens=self._read[name],
                digest=source.digest,
                ended=name in self._ended,
            )
            for name, source in self._sources.items()
        }
        pending = self._pending[0].name if self._pending else ""
        position = _Position(sources=sources, pending=pending, offset=self._offset, tokens=self._tokens)
        return msgspec.json.encode(position).decode()

    def seek(self, position: str) -> None:
        """Continue from a position. DataError when the data has changed since."""
        saved = msgspec.json.decode(position, type=_Position)
        for name, source in self._sources.items():
            at = saved.sources.get(name)
            if at is None or at.digest != source.digest:
                raise DataError(f"{name}: its content has changed since mid-training was interrupted; restore it")
            self._read[name] = at.tokens
            unfinished = name == saved.pending
            source.seek(at.epoch, at.drawn - unfinished)
            if unfinished:
                document = source.draw()
                assert document is not None
                self._pending = (source, document)
        self._ended = {name for name, at in saved.sources.items() if at.ended}
        self._offset, self._tokens = saved.offset, saved.tokens

    def held_out(self) -> Mapping[str, Iterator[Document]]:
        """Held-out documents of each source, cut to the longest sequence at the start."""
        return {name: self._cut(source) for name, source in self._sources.items()}

    def _cut(self, source: Source) -> Iterator[Document]:
        length = self._recipe.sequence
        for document in source.held_out():
            part = Document(ids=document.ids[:length], weights=document.weights[:length])
            if part.teaches:
                yield part
