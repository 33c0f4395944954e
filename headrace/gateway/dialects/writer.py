"""One streamed reply, in any dialect: parts as they are sampled, then the rest of the whole reply.

The whole reply is right. A part that did not arrive ends the parts: what it had comes with the whole reply, so a client
gets every character once and in order. The order is thinking, text, calls, and text behind the calls.
"""

from collections.abc import Iterator

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.messages.product import ClientCall, ClientTurnPart, ClientUsage


class BrokenStream(HeadraceError):
    """The whole reply does not begin with what the client has: a call that turned out to be malformed, or a turn that
    was sampled again."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a reply, which has them before it is sampled."""

    id: str
    model: str
    created: int


class Writer:
    """Makes the events of one reply. A dialect defines the methods that return events of one kind."""

    def __init__(self, request: ModelRequest, head: Head) -> None:
        self.request, self.head = request, head
        self.cut = False
        """Whether the turn ended, at its limit, in the middle of the newest call."""
        self._next = 0
        self._begun = False
        self._thinking = self.text = ""
        """The beginning of the reply that the client has; `text` is that before the calls."""
        self._calls: list[ClientCall] = []

    # Of a dialect.

    def begin(self, usage: ClientUsage) -> Iterator[bytes]:
        """The events before all others. usage: of the prompt."""
        raise NotImplementedError

    def think(self, piece: str) -> Iterator[bytes]:
        """More thinking."""
        raise NotImplementedError

    def say(self, piece: str) -> Iterator[bytes]:
        """More text before the calls."""
        raise NotImplementedError

    def call(self, index: int, begun: ClientCall) -> Iterator[bytes]:
        """A call, with the beginning of its arguments."""
        raise NotImplementedError

    def argue(self, index: int, piece: str) -> Iterator[bytes]:
        """More of the arguments of the newest call."""
        raise NotImplementedError

    def add(self, piece: str) -> Iterator[bytes]:
        """Text behind the calls, without the line end before it."""
        raise NotImplementedError

    def finish(self, reply: ModelReply) -> Iterator[bytes]:
        """The events behind all others."""
        raise NotImplementedError

    def fail(self, status: int, text: str) -> Iterator[bytes]:
        """The end of a reply that failed after its first byte."""
        raise NotImplementedError

    # For the endpoints.

    def part(self, part: ClientTurnPart) -> Iterator[bytes]:
        """The events of a part."""
        if part.number != self._next:
            return
        self._next += 1
        yield from self._begin(part.usage)
        yield from self._extended(part.thinking, part.text)
        for piece in part.calls:
            yield from self._called(piece)

    def end(self, reply: ModelReply) -> Iterator[bytes]:
        """The events of what no part had, and the end. BrokenStream."""
        yield from self._begin(reply.usage)
        reply = msgspec.structs.replace(reply, id=self.head.id, model=self.head.model, created=self.head.created)
        thinking, text = _rest(reply.thinking, self._thinking), _rest(reply.text, self.text)
        late = thinking if self.text or self._calls else ""
        if self._calls:
            behind = "\n".join(filter(None, (text.removeprefix("\n"), reply.after)))
            yield from self._extended("" if late else thinking, "")
        else:
            behind = reply.after
            yield from self._extended("" if late else thinking, text)
        sent = len(self._calls)
        for index, had in enumerate(self._calls):
            call = reply.calls[index] if index < len(reply.calls) else None
            if call is not None and call.id == had.id:
                if rest := _rest(call.arguments, had.arguments):
                    yield from self._called(msgspec.structs.replace(call, arguments=rest))
            elif reply.stop == "length" and index == sent - 1:
                self.cut = True
            else:
                raise BrokenStream("the model wrote a call that cannot be read")
        for call in reply.calls[sent:]:
            yield from self._called(call)
        if behind:
            yield from self.add(behind)
        if late:
            yield from self.think(late)
        yield from self.finish(reply)

    def _begin(self, usage: ClientUsage) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from self.begin(usage)

    def _extended(self, thinking: str, text: str) -> Iterator[bytes]:
        if thinking:
            self._thinking += thinking
            yield from self.think(thinking)
        if text:
            self.text += text
            yield from self.say(text)

    def _called(self, piece: ClientCall) -> Iterator[bytes]:
        """A call that begins, or that goes on."""
        at = next((index for index, call in enumerate(self._calls) if call.id == piece.id), None)
        if at is None:
            self._calls.append(piece)
            yield from self.call(len(self._calls) - 1, piece)
        else:
            had = self._calls[at]
            self._calls[at] = msgspec.structs.replace(had, arguments=had.arguments + piece.arguments)
            yield from self.argue(at, piece.arguments)


def _rest(whole: str, had: str) -> str:
    if not whole.startswith(had):
        raise BrokenStream("the model's answer changed while it was streamed")
    return whole[len(had) :]
