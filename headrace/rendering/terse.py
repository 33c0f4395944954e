"""The terse format: every tag is one id, there is no system prompt, and each tool has its own tags.

It is the format of policies that headrace trains from the first token. Sampled ids stay as they are; only text from
outside (the task, results, a summary request) is encoded, once, and appended.
"""

import re
from collections.abc import Sequence

from headrace.messages.rollout import RendererBundle, ToolCall, ToolResult
from headrace.rendering import schemas
from headrace.rendering.base import Call, Exchange, Parsed, RendererError
from headrace.rendering.kinds import token_kinds
from headrace.rendering.parsers.base import MOST_CALLS, Part
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.tokenizer import Piece, Tokenizer

_NAME = re.compile(r"<([A-Za-z_][A-Za-z0-9_]*)")
_ATTRIBUTE = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')
_NO_CALLS = frozenset({"think", "thinking", "turn", "task", "result", "error", "summary", "pad"})
"""Tags that are not calls: thoughts, and frames that a policy may write by mistake."""
_TASK, _TURN = ("<task>", "</task>"), ("<turn>", "</turn>")
_SUMMARY = ("<summary>", "</summary>")


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def _unescape(value: str) -> str:
    return value.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")


def call_pieces(tool: ToolSchema, arguments: dict[str, str]) -> list[Piece]:
    """A call as the policy should write it."""
    given = [a for a in tool.attributes if a.name in arguments]
    body = arguments.get(tool.body.name) if tool.body else None
    if not given and body is None:
        return [(tool.empty, True)]
    pieces: list[Piece] = []
    for index, attribute in enumerate(given):
        pieces.append((f'" {attribute.name}="' if index else f'<{tool.name} {attribute.name}="', True))
        pieces.append((_escape(arguments[attribute.name]), False))
    if body is None:
        return [*pieces, ('"/>', True)]
    pieces.append(('">', True) if given else (f"<{tool.name}>", True))
    pieces.append((body.replace(tool.closing, _escape(tool.closing)), False))
    return [*pieces, (tool.closing, True)]


class Format:
    """The text of an episode as pieces, before any tokenizer."""

    def __init__(self, tools: Sequence[ToolSchema] = schemas.TABLE) -> None:
        """tools: those that may be called."""
        self._tools = {tool.name: tool for tool in tools}

    def prompt_pieces(self, task_prompt: str, summary: str = "") -> list[Piece]:
        """The start of a segment: the task, the summary of the previous segment, and the opened turn."""
        pieces: list[Piece] = [(_TASK[0], True), (task_prompt, False)]
        if summary:
            pieces += [(_SUMMARY[0], True), (summary, False), (_SUMMARY[1], True)]
        return [*pieces, (_TASK[1], True), (_TURN[0], True)]

    def result_pieces(self, results: Sequence[ToolResult], closed: bool = True) -> list[Piece]:
        """Results in call order, then the opening of the next turn. closed: whether the policy wrote the
        end of its turn; if not, it is added here."""
        pieces: list[Piece] = [] if closed else [(_TURN[1], True)]
        for result in results:
            frame = schemas.RESULT if result.ok else schemas.ERROR
            pieces += [(f"<{frame}>", True), (result.output, False), (f"</{frame}>", True)]
        return [piece for piece in [*pieces, (_TURN[0], True)] if piece[0]]

    def turn_pieces(self, calls: Sequence[Call], thought: str = "") -> list[Piece]:
        """A whole turn as a policy should write it, its end included: for scripts and traces."""
        pieces: list[Piece] = [(thought, False)] if thought else []
        for name, arguments in calls:
            pieces += call_pieces(self._tools[name], arguments)
        return [*pieces, (_TURN[1], True)]


class TerseRenderer(Format):
    """The terse format with a tokenizer that was trained for it."""

    detailed_results = False
    parallel = True

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[ToolSchema] = schemas.TABLE, bundle: str = "") -> None:
        """RendererError when the tokenizer lacks one of the format's tags."""
        super().__init__(tools)
        self.tokenizer, self.bundle = tokenizer, bundle
        stop = tokenizer.tag(_TURN[1])
        if stop is None or tokenizer.tag(_TURN[0]) is None:
            raise RendererError(
                f"the tokenizer has no token {_TURN[1]!r}, which ends a turn in the terse format; a checkpoint with a "
                'chat template needs [policy] renderer = "auto"'
            )
        self.stop_ids: tuple[int, ...] = (stop,)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of pieces. A tag becomes its own id if the tokenizer has one; content never becomes a tag's id."""
        ids: list[int] = []
        for text, is_tag in pieces:
            tag = self.tokenizer.tag(text) if is_tag else None
            ids += [tag] if tag is not None else self.tokenizer.encode(text) if text else []
        return ids

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """The start of a segment. summary: what the policy wrote at the end of the last one, taken over as ids."""
        if not summary:
            return self.encode(self.prompt_pieces(task_prompt))
        pieces = self.prompt_pieces(task_prompt, "\0")
        at = pieces.index(("\0", False))
        ids = [id for id in summary if id not in self.stop_ids]
        return [*self.encode(pieces[:at]), *ids, *self.encode(pieces[at + 1 :])]

    def delta(
        self, history: Sequence[Exchange], *, stopped: int | None, summary: bool = False, task: str = ""
    ) -> list[int]:
        """Results of the last turn and the next task, then the opening of the next turn or of a summary."""
        results, closed = history[-1].results, stopped is not None
        if not summary:
            *pieces, opening = self.result_pieces(results, closed)
            pieces += [(_TASK[0], True), (task, False), (_TASK[1], True)] if task else []
            return self.encode([*pieces, opening])
        pieces = self.result_pieces(results, closed)[:-1] if results or not closed else []
        return self.encode([*pieces, (_SUMMARY[0], True), (_TURN[0], True)])

    def turn(self, calls: Sequence[Call], thought: str = "", *, before: int = 0) -> list[int]:
        """Ids of `turn_pieces`; the terse format does not number calls."""
        return self.encode(self.turn_pieces(calls, thought))

    def text(self, ids: Sequence[int]) -> str:
        """The text, without the token that ended it."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> Parsed:
        """The calls of a turn in order; one that cannot run carries an `error` that the policy can use.

        Call ids number the calls of this turn; the loop makes them unique in the trajectory.
        """
        text = self.text(ids)
        calls: list[ToolCall] = []
        parts: list[Part] = []
        at = 0
        while match := _NAME.search(text, at):
            name = match.group(1)
            if name in _NO_CALLS:
                at = match.end()
                if name.startswith("think"):  # a call that thinking mentions does not run, also if it is never closed
                    closing = f"</{name}>"
                    end = text.find(closing, at)
                    at = end + len(closing) if end >= 0 else len(text)
                    parts.append(Part("thinking", match.start(), at))
                continue
            if len(calls) == MOST_CALLS:
                error = f"a turn has at most {MOST_CALLS} calls; write the others in the next turn"
                calls.append(ToolCall(id=str(MOST_CALLS), name="", error=error))
                break
            call, at = self._call(text, match, str(len(calls)))
            calls.append(call)
            parts.append(Part("call", match.start(), at))
        if not calls:
            calls.append(ToolCall(id="0", name="", error=f"no call; write one such as {self._example()}"))
        return Parsed(calls=tuple(calls), text=text, kinds=token_kinds(self.tokenizer, ids, parts))

    def _example(self) -> str:
        tool = next(iter(self._tools.values()))
        return "".join(text for text, _ in call_pieces(tool, {a.name: "..." for a in tool.attributes if a.required}))

    def _call(self, text: str, match: re.Match[str], id: str) -> tuple[ToolCall, int]:
        """The call that starts at `match`, and where the search for the next one goes on."""
        name, at = match.group(1), match.end()
        arguments: dict[str, str] = {}
        while attribute := _ATTRIBUTE.match(text, at):
            arguments[attribute.group(1)] = _unescape(attribute.group(2))
            at = attribute.end()
        tool = self._tools.get(name)

        def failed(why: str) -> tuple[ToolCall, int]:
            return ToolCall(id=id, name=name, arguments=arguments, error=why), at

        if tool is None:
            return failed(f"no tool {name}; there are {', '.join(self._tools)}")
        rest = re.match(r"\s*(/?>)", text[at : at + 64])
        if rest is None:
            return failed(f"{name}: the call is not closed")
        at += rest.end()
        if rest.group(1) == ">":
            end = text.find(tool.closing, at)
            if end < 0:
                return failed(f"{name}: {tool.closing} is missing")
            body, at = text[at:end], end + len(tool.closing)
            if tool.body:
                arguments[tool.body.name] = body.replace(_escape(tool.closing), tool.closing)
            elif body.strip():
                return failed(f"{name}: takes no text between its tags")
        if complaint := tool.complaint(arguments):
            return failed(complaint)
        return ToolCall(id=id, name=name, arguments=arguments), at


def build(bundle: RendererBundle, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> TerseRenderer:
    """The renderer of a bundle in the terse format. Its tags do not depend on the tools of a task; those of a tool from
    outside have no ids of their own."""
    outside = [tool for tool in tools if tool.name not in schemas.BY_NAME]
    return TerseRenderer(tokenizer, (*schemas.TABLE, *outside), bundle.sha256)
