"""Checks every assumption of the renderer on a chat template before the template is used.

A format that fails is refused, and the error names it. There is no fallback: a run in a format that is slightly
wrong would train a policy on it.
"""

from collections.abc import Callable, Sequence

import msgspec

from headrace.messages.rollout import ToolCall
from headrace.rendering.base import Call, RendererError
from headrace.rendering.native.conversation import Conversation, Inserter, Traits, answered
from headrace.rendering.native.renderer import THOUGHT_FIELDS, NativeRenderer
from headrace.rendering.native.slots import CHANGES, TELLING, Change, Kind, Slots
from headrace.rendering.native.template import ChatTemplate, Message, TemplateRefused
from headrace.rendering.parsers.base import Syntax
from headrace.rendering.schemas import ToolSchema

Build = Callable[[Conversation, Inserter, str], list[Message]]
"""Messages of a conversation with a given content at one place."""


class _AsItIs:
    """Inserts contents unchanged, without placeholders."""

    def add(self, kind: Kind, content: str) -> str:
        return content


def _opening(conversation: Conversation, slots: Inserter, text: str) -> list[Message]:
    return conversation.opening(slots, text)


def _results(conversation: Conversation, slots: Inserter, *outputs: str) -> list[Message]:
    name = next(iter(conversation.tools))
    calls = [ToolCall(id=str(index), name=name) for index in range(len(outputs))]
    turns = [answered(calls, outputs)]
    return [*conversation.opening(slots, "task"), *conversation.history(slots, turns, "anchor")]


def _call(conversation: Conversation, slots: Inserter, text: str) -> list[Message]:
    written = conversation.written(slots, [sentinel(conversation, text)], "", 0, THOUGHT_FIELDS[0])
    return [*conversation.opening(slots, "task"), *written]


def _thought(conversation: Conversation, slots: Inserter, text: str) -> list[Message]:
    mark = slots.add("thought", text)
    return [*conversation.opening(slots, "task"), *conversation.written(slots, [], mark, 0, THOUGHT_FIELDS[0])]


PLACES: dict[Kind, Build] = {"user": _opening, "result": _results, "argument": _call, "thought": _thought}


def sentinel(conversation: Conversation, text: str) -> Call:
    """A call of the first tool that takes an argument; `text` is the value of every required argument."""
    tool = next((tool for tool in conversation.tools.values() if tool.parameters), None)
    if tool is None:
        raise RendererError("a chat format can be checked only with a tool that takes an argument")
    required = [name for name, parameter in tool.parameters.items() if parameter.required]
    return tool.name, dict.fromkeys(required or list(tool.parameters)[:1], text)


def traits(template: ChatTemplate, syntax: Syntax, tools: Sequence[ToolSchema], system: str) -> Traits:
    """The abilities of the template. RendererError when it cannot show a task with tools, or a call with its result."""

    def shows(traits: Traits, build: Callable[[Conversation], list[Message]], *words: str) -> str:
        """The reason for which the rendered messages do not contain these words, each as often as here; empty when they
        do."""
        conversation = Conversation(template, syntax, tools, system, traits)
        try:
            text = conversation.render(build(conversation), generation=True)
        except TemplateRefused as error:
            return str(error) or "it raises an exception"
        return next((f"{word!r} is missing" for word in words if text.count(word) < words.count(word)), "")

    def task(conversation: Conversation) -> list[Message]:
        return _opening(conversation, _AsItIs(), "task")

    observed = Traits(system=not shows(Traits(), task, system), tools=True, parallel=False)
    names = [tool.name for tool in tools]
    if shows(observed, task, *names):
        observed = msgspec.structs.replace(observed, tools=False)
    if why := shows(observed, task, "task", *names):
        raise RendererError(f"the chat template does not show a task with its tools: {why}")
    forms = [
        msgspec.structs.replace(observed, objects=objects, empty=empty)
        for empty in ("", None)
        for objects in (True, False)
    ]

    def single(conversation: Conversation) -> list[Message]:
        return _results(conversation, _AsItIs(), "result-1")

    reasons = {form: shows(form, single, "result-1", "anchor") for form in forms}
    taken = next((form for form, why in reasons.items() if not why), None)
    if taken is None:
        raise RendererError(f"the chat template does not show a call with its result: {reasons[observed]}")
    observed = taken
    both = ("result-1", "result-2")
    double = msgspec.structs.replace(observed, parallel=True)
    shown = (*both, "anchor", "anchor")  # the calls too: gpt-oss's template drops the second and keeps its result
    return observed if shows(double, lambda conversation: _results(conversation, _AsItIs(), *both), *shown) else double


def changes(conversation: Conversation) -> dict[Kind, Change]:
    """The change that the template makes to each kind of content. RendererError when it is none of the known ones."""
    changes: dict[Kind, Change] = {"system": CHANGES["verbatim"], "thought": CHANGES["verbatim"]}
    for kind, build in PLACES.items():
        name = next((name for name, change in CHANGES.items() if _explains(conversation, kind, build, change)), None)
        if name is not None:
            changes[kind] = CHANGES[name]
        elif kind != "thought":
            raise RendererError(f"the chat template changes a {kind} in a way that is none of {', '.join(CHANGES)}")
    return changes


def _explains(conversation: Conversation, kind: Kind, build: Build, change: Change) -> bool:
    """Whether placeholders that are filled through `change` give the text that the template renders without them."""
    verbatim = CHANGES["verbatim"]
    every: dict[Kind, Change] = dict.fromkeys(("system", "user", "result", "argument", "thought"), verbatim)
    for text in TELLING:
        slots = Slots()
        try:
            rendered = conversation.render(build(conversation, slots, text), generation=True)
            real = conversation.render(build(conversation, _AsItIs(), text), generation=True)
        except TemplateRefused as error:
            if kind == "thought":  # some templates refuse an empty turn, which does not occur
                return False
            raise RendererError(f"the chat template does not take a {kind} such as {text!r}: {error}") from None
        if "".join(piece for piece, _ in slots.fill(rendered, {**every, kind: change})) != real:
            return False
    return True


def round_trip(renderer: NativeRenderer, conversation: Conversation) -> None:
    """Check that calls are read as they were written. RendererError names the first that is not."""
    for text in TELLING:
        name, arguments = sentinel(conversation, text)
        prompt = renderer.prompt("task")
        parsed = renderer.parse(renderer.turn([(name, arguments)]), prompt=prompt)
        read = [(call.name, call.arguments, call.error) for call in parsed.calls]
        if read != [(name, arguments, "")]:
            raise RendererError(
                f"a call with the argument {text!r} is written by the chat template but read as {read[0]}; "
                "set [policy] renderer to the syntax that the template has"
            )
