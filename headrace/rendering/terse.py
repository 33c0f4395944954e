"""Between messages and token ids: prompts and results in, tool calls out. Nothing is ever tokenised twice.

What the policy wrote stays the ids that it sampled; only what comes from outside (the task, results, a summary
request) is encoded, once, and appended. Two markups: ``terse`` for a policy that was trained on it from nothing
(every tag one id, no system prompt) and ``chat`` for a big model (its own chat tokens, a system prompt that
explains the tools).
"""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.messages.rollout import ToolCall, ToolResult
from headrace.policy import schemas
from headrace.policy.schemas import ToolSchema
from headrace.policy.tokenizer import Tokenizer

Piece = tuple[str, bool]
"""Text, and whether it is a tag (part of the format) rather than content."""

_NAME = re.compile(r"<([A-Za-z_][A-Za-z0-9_]*)")
_ATTRIBUTE = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')
_SILENT = frozenset({"think", "thinking", "turn", "task", "result", "error", "summary", "pad"})
"""Tags that are no calls: thoughts, and frames that a policy may babble."""

_SYSTEM = """You are a coding agent in a repository. Act by writing tool calls as XML; several calls in one turn run \
together and are answered in order. The tools:

{tools}

Find the cause, change as little as possible, run the tests, then call <finish/>."""


class Markup(msgspec.Struct, frozen=True, kw_only=True):
    """The frames around what is said. `{tools}` in `system` becomes the list of tools."""

    system: str = ""
    task: tuple[str, str]
    turn: tuple[str, str]
    results: tuple[str, str] = ("", "")
    summary_request: str


TERSE = Markup(task=("<task>", "</task>"), turn=("<turn>", "</turn>"), summary_request="<summary>")

CHAT = Markup(
    system="<|im_start|>system\n" + _SYSTEM + "<|im_end|>\n",
    task=("<|im_start|>user\n", "<|im_end|>\n"),
    turn=("<|im_start|>assistant\n", "<|im_end|>"),
    results=("\n<|im_start|>user\n", "<|im_end|>\n"),
    summary_request="The context is nearly full. Write down all that is needed to go on from here, then stop.",
)

_SPECIAL = re.compile(r"(<\|[a-z_]+\|>)")


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def _unescape(value: str) -> str:
    return value.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")


def describe(tool: ToolSchema) -> str:
    """One line of a system prompt: how the call is written and what it does."""
    text = f"<{tool.name}"
    for attribute in tool.attributes:
        text += f' {attribute.name}="..."' if attribute.required else f' [{attribute.name}="..."]'
    text += f">{tool.body.name}{tool.closing}" if tool.body else "/>"
    notes = "; ".join(f"{p.name}: {p.about}" for p in (*tool.attributes, *([tool.body] if tool.body else [])))
    return f"- {text}  {tool.about}" + (f" ({notes})" if notes else "")


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
    """How an episode is spelled, before any tokenizer: the tools that may be called, and the markup."""

    def __init__(self, tools: Sequence[str] | None = None, markup: Markup | Literal["terse", "chat"] = "terse") -> None:
        self.markup = {"terse": TERSE, "chat": CHAT}[markup] if isinstance(markup, str) else markup
        names = [tool.name for tool in schemas.TABLE] if tools is None else tools
        self._tools = {name: schemas.BY_NAME[name] for name in names}

    def prompt_pieces(self, task_prompt: str, summary: str = "") -> list[Piece]:
        """The start of a segment: the task, what the previous segment left behind, and the opened turn."""
        markup, pieces = self.markup, []
        if markup.system:
            listing = "\n".join(describe(tool) for tool in self._tools.values())
            pieces.append((markup.system.replace("{tools}", listing), True))
        pieces += [(markup.task[0], True), (task_prompt, False)]
        if summary:
            pieces += [("<summary>", True), (summary, False), ("</summary>", True)]
        return [*pieces, (markup.task[1], True), (markup.turn[0], True)]

    def result_pieces(self, results: Sequence[ToolResult], closed: bool = True) -> list[Piece]:
        """Answers in call order, then the next turn's opening. `closed` is False when the turn hit its token limit and
        its end has to be written for it."""
        pieces: list[Piece] = [] if closed else [(self.markup.turn[1], True)]
        pieces.append((self.markup.results[0], True))
        for result in results:
            frame = schemas.RESULT if result.ok else schemas.ERROR
            pieces += [(f"<{frame}>", True), (result.output, False), (f"</{frame}>", True)]
        pieces += [(self.markup.results[1], True), (self.markup.turn[0], True)]
        return [piece for piece in pieces if piece[0]]

    def turn_pieces(self, calls: Sequence[tuple[str, dict[str, str]]], thought: str = "") -> list[Piece]:
        """A whole turn as a policy should write it, its end included: for scripts and traces."""
        pieces: list[Piece] = [(thought, False)] if thought else []
        for name, arguments in calls:
            pieces += call_pieces(self._tools[name], arguments)
        return [*pieces, (self.markup.turn[1], True)]


class Renderer(Format):
    """The format of one policy: spelling and tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[str] | None = None,
        markup: Markup | Literal["terse", "chat"] = "terse",
    ) -> None:
        super().__init__(tools, markup)
        self.tokenizer = tokenizer
        stop = tokenizer.tag(self.markup.turn[1])
        if stop is None:
            raise ValueError(f"the tokenizer has no token {self.markup.turn[1]!r}, which ends a turn")
        self.stop_ids: tuple[int, ...] = (stop,)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of pieces: a tag is its own id where the tokenizer has one, content never is."""
        ids: list[int] = []
        for text, is_tag in pieces:
            for part in _SPECIAL.split(text) if is_tag else (text,):
                tag = self.tokenizer.tag(part) if is_tag else None
                ids += [tag] if tag is not None else self.tokenizer.encode(part) if part else []
        return ids

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """The start of a segment. `summary` is what the policy wrote at the end of the last one, taken over as ids."""
        if not summary:
            return self.encode(self.prompt_pieces(task_prompt))
        pieces = self.prompt_pieces(task_prompt, "\0")
        at = pieces.index(("\0", False))
        kept = [id for id in summary if id not in self.stop_ids]
        return [*self.encode(pieces[:at]), *kept, *self.encode(pieces[at + 1 :])]

    def results(self, results: Sequence[ToolResult], closed: bool = True) -> list[int]:
        """Ids of `result_pieces`."""
        return self.encode(self.result_pieces(results, closed))

    def turn(self, calls: Sequence[tuple[str, dict[str, str]]], thought: str = "") -> list[int]:
        """Ids of `turn_pieces`."""
        return self.encode(self.turn_pieces(calls, thought))

    def summary_request(self, results: Sequence[ToolResult] = (), closed: bool = True) -> list[int]:
        """What asks the policy for a summary instead of a turn, after the results that it has not read yet."""
        pieces = self.result_pieces(results, closed)[:-1] if results or not closed else []
        request: list[Piece]
        if self.markup.results[0]:
            request = [
                (self.markup.task[0], True),
                (self.markup.summary_request, False),
                (self.markup.task[1], True),
                (self.markup.turn[0], True),
            ]
        else:
            request = [(self.markup.summary_request, True), (self.markup.turn[0], True)]
        return self.encode([*pieces, *request])

    def text(self, ids: Sequence[int]) -> str:
        """What was written, without the token that ended it."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def parse(self, ids: Sequence[int]) -> list[ToolCall]:
        """The calls of a turn in order, never empty: what can't be run carries an `error` that the policy can use.

        Call ids number the calls of this turn; the loop makes them unique in the trajectory.
        """
        text = self.text(ids)
        calls: list[ToolCall] = []
        at = 0
        while found := _NAME.search(text, at):
            name = found.group(1)
            if name in _SILENT:
                closing = f"</{name}>"
                end = text.find(closing, found.end()) if name.startswith("think") else -1
                at = end + len(closing) if end >= 0 else found.end()
                continue
            call, at = self._call(text, found, str(len(calls)))
            calls.append(call)
        if not calls:
            calls.append(ToolCall(id="0", name="", error=f"no call; write one such as {self._example()}"))
        return calls

    def _example(self) -> str:
        tool = next(iter(self._tools.values()))
        return "".join(text for text, _ in call_pieces(tool, {a.name: "..." for a in tool.attributes if a.required}))

    def _call(self, text: str, found: re.Match[str], id: str) -> tuple[ToolCall, int]:
        """The call that starts at `found`, and where the search for the next one goes on."""
        name, at = found.group(1), found.end()
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
        known = {p.name: p for p in (*tool.attributes, *([tool.body] if tool.body else []))}
        for argument in arguments:
            if argument not in known:
                return failed(f"{name}: no argument {argument}; there are {', '.join(known) or 'none'}")
        for parameter in known.values():
            if parameter.required and parameter.name not in arguments:
                return failed(f"{name}: {parameter.name} is missing")
        return ToolCall(id=id, name=name, arguments=arguments), at
