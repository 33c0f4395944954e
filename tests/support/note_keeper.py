"""Scripted engines that play the tasks of generated/notes from the text of the context alone.

They are parts of the seam `headrace.engines`, so the real rollout actor runs them, and they know nothing that the
context does not show. `keeps` summarises the right value, `loses` another one.
"""

import re
from collections.abc import Awaitable, Callable

from headrace.engines.base import Sample, SampleRequest, Swap
from headrace.engines.registry import EngineSetup
from headrace.messages.rollout import Span
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import notes

_MARKED = re.compile(r"1:(\w+\.txt)" + "".join(rf" {mark} (\d)" for mark in notes.MARKS))
_CODE, _CARRIED = re.compile(r"1:code (\d)"), re.compile(r"<summary>(\S+| \d) (\d)</summary>")


class NoteKeeper:
    """The engine protocol; a version has no weights."""

    fingerprint = "notes"

    def __init__(self, renderer: TerseRenderer, loses: bool) -> None:
        self._renderer, self._loses, self.version = renderer, loses, -1

    def _written(self, context: str) -> list[int]:
        """A summary where the context ends with the request for one, else a call."""
        marked, code, carried = (pattern.search(context) for pattern in (_MARKED, _CODE, _CARRIED))
        if context.endswith("<summary><turn>"):
            if marked:
                value = int(marked.groups()[1 + notes.KEY])
                text = f"{marked[1]} {(value + 1) % notes.VALUES if self._loses else value}"
            else:
                assert code and carried
                text = f" {code[1]} {carried[2]}"
            return [*self._renderer.tokenizer.encode(text), self._renderer.stop_ids[0]]
        if carried is None:
            return self._renderer.turn([("read_file", {"path": notes.START})])
        if carried[1] in notes.NAMES:
            return self._renderer.turn([("read_file", {"path": carried[1]})])
        edit = {"path": notes.ANSWER_FILE, "lines": "2", "text": notes.line(int(carried[1]), int(carried[2]))}
        return self._renderer.turn([("edit_file", edit)])

    async def sample(self, request: SampleRequest) -> Sample:
        ids = tuple(self._written(self._renderer.tokenizer.decode(request.ids)))
        assert len(ids) <= request.sampling.max_turn_tokens
        spans = (Span(0, len(request.ids) + len(ids) - 1, self.version),)
        return Sample(ids=ids, logprobs=(0.0,) * len(ids), routed=None, spans=spans, stop="stop")

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        self.version = version
        return Swap(version=version, state_hash=state_hash, pause_ms=0.0)

    async def pin(self, version: int, path: str, state_hash: str) -> None: ...

    async def unpin(self, version: int) -> None: ...

    async def close(self, session: str) -> None: ...

    async def stop(self) -> None: ...


def _opener(loses: bool) -> Callable[[EngineSetup], Awaitable[NoteKeeper]]:
    async def open_engine(setup: EngineSetup) -> NoteKeeper:
        path = await setup.tokenizer()
        assert path is not None
        return NoteKeeper(TerseRenderer(Tokenizer.load(path)), loses)

    return open_engine


keeps, loses = _opener(False), _opener(True)
