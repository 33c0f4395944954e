"""An engine, by its name in [engine] kind, whose policy uses a client program's own tools, in the format `hermes`."""

import asyncio
import json
from typing import Any, NamedTuple

import msgspec

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.engines.registry import EngineSetup
from headrace.messages.rollout import Span
from headrace.rendering.tokenizer import Tokenizer

Said = tuple[str, list[tuple[str, dict[str, Any]]]]
"""The text of a turn, and the names and arguments of its calls."""


class Script(NamedTuple):
    """The policy's answers in each turn of the conversations whose prompt contains `mark`; to others it says a word."""

    mark: str
    turns: list[Said]
    answer: str = "A word."
    """In a conversation without the mark."""


class Play:
    """A script that is played, and what was asked."""

    def __init__(self, script: Script, held: int | None = None) -> None:
        """held: number of ids after which the first turn stops until it is cut; None: it does not."""
        self.script, self.held = script, held
        self.sessions: list[str] = []
        """Of every turn of the script; the cut turn's is the first."""
        self.begun, self.cut = asyncio.Event(), asyncio.Event()


PLAYS: list[Play] = []
"""The last one is played now."""


class ClientEngine:
    """Plays the last of `PLAYS`."""

    fingerprint = "scripted"
    version = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def sample(self, request: SampleRequest) -> Sample:
        play, prompt = PLAYS[-1], self._tokenizer.decode(request.ids)
        if play.script.mark not in prompt:
            return self._sampled(request, play.script.answer)
        play.sessions.append(request.session.partition("/")[0].removesuffix("-0-0"))
        turn = min(prompt.count("<|im_start|>assistant"), len(play.script.turns)) - 1
        text, calls = play.script.turns[turn]
        said = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        text += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in said)
        if len(play.sessions) > 1 or play.held is None:
            return self._sampled(request, text)
        assert request.progress is not None
        request.progress.on_cut = play.cut.set
        request.progress.add(self._tokenizer.encode(text)[: play.held], 0)
        play.begun.set()
        await play.cut.wait()
        return self._sampled(request, text, play.held)

    def _sampled(self, request: SampleRequest, text: str, held: int | None = None) -> Sample:
        """held: ids of a turn that was cut."""
        ids = (*self._tokenizer.encode(text), request.stop_ids[0])[:held]
        if request.progress is not None:
            request.progress.add(ids, 0)
        span = Span(0, len(request.ids) + len(ids) - 1, 0)
        made = Sample(ids=ids, logprobs=(-0.5,) * len(ids), routed=None, spans=(span,), stop="stop")
        return made if held is None else msgspec.structs.replace(made, stop="abort")

    async def close(self, session: str) -> None: ...

    async def stop(self) -> None: ...

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        return Swap(version=version, state_hash=state_hash, pause_ms=0.0)

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        raise EngineError("one version alone")

    async def unpin(self, version: int) -> None: ...


async def open_engine(setup: EngineSetup) -> ClientEngine:
    path = await setup.tokenizer()
    assert path is not None
    return ClientEngine(Tokenizer.parse(path.read_text(encoding="utf-8")))
