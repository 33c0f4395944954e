"""An engine, by its name in [engine] kind, whose policy uses a client program's own tools, in the format `hermes`."""

import asyncio
import json
from typing import Any, NamedTuple

from headrace.engines.base import Sample, SampleRequest
from tests.support.text_engine import TextEngine

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


class ClientEngine(TextEngine):
    """Plays the last of `PLAYS`."""

    async def sample(self, request: SampleRequest) -> Sample:
        play, prompt = PLAYS[-1], self.tokenizer.decode(request.ids)
        if play.script.mark not in prompt or (request.answer and not request.free):
            return self.sampled(request, play.script.answer)
        play.sessions.append(request.session.partition("/")[0].removesuffix("-0-0"))
        turn = min(prompt.count("<|im_start|>assistant"), len(play.script.turns)) - 1
        text, calls = play.script.turns[turn]
        said = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        text += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in said)
        if len(play.sessions) > 1 or play.held is None:
            return self.sampled(request, text)
        assert request.progress is not None
        request.progress.on_cut = play.cut.set
        request.progress.add(self.tokenizer.encode(text)[: play.held], 0)
        play.begun.set()
        await play.cut.wait()
        return self.sampled(request, text, play.held)


open_engine = ClientEngine.open
