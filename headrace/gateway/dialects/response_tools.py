"""Tools of the responses dialect: functions, custom tools whose argument is a text, and namespaces of both.

Codex sends them in the key `tools` or, for models that it knows, in an input item `additional_tools`. The policy is
offered functions alone. A custom tool becomes a function with the one argument `input`; a name that two namespaces
have gets the namespace in front.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.gateway.conversation import Origin
from headrace.gateway.dialects import base
from headrace.gateway.dialects.base import Body
from headrace.messages.product import ClientCall, ClientTool

INPUT = "input"
"""The argument of a custom tool."""


class Tools(NamedTuple):
    """The tools of a request."""

    tools: tuple[ClientTool, ...]
    origins: dict[str, Origin]
    """Of each tool, by the name that the policy reads."""
    vendors: tuple[str, ...]
    """Tools that only the vendor's servers run, as ``tools.TYPE``."""

    def call(self, item: Body, field: str, arguments: str) -> ClientCall:
        """A call of the history."""
        name, namespace = (
            base.string(item.get("name"), f"{field}.name"),
            base.string(item.get("namespace"), f"{field}.namespace"),
        )
        id = base.string(item.get("call_id"), f"{field}.call_id")
        return ClientCall(id=id, name=self.named(name, namespace), arguments=arguments)

    def named(self, name: str, namespace: str = "") -> str:
        """The name that the policy reads of a client's tool."""
        known = (read for read, origin in self.origins.items() if (origin.name, origin.namespace) == (name, namespace))
        return next(known, name)


def tools_of(body: Body, items: Sequence[dict[str, Any]]) -> Tools:
    """The tools of a request with these input items. Unusable."""
    choice_allows = base.offered(body)
    found: list[tuple[Origin, ClientTool]] = []
    vendors: dict[str, None] = {}
    given = [(choice_allows, "tools")]
    for index, item in enumerate(items):
        if item.get("type") == "additional_tools" and body.get("tool_choice") != "none":
            given.append((base.objects(item.get("tools"), f"input[{index}].tools"), f"input[{index}].tools"))
    for entries, field in given:
        for kind, origin, tool in _flat(entries, field):
            if tool is None:
                vendors[f"tools.{kind}"] = None
            else:
                found.append((origin, tool))
    times = Counter(origin.name for origin, _ in found)
    tools: list[ClientTool] = []
    origins: dict[str, Origin] = {}
    for origin, tool in found:
        name = f"{origin.namespace}_{origin.name}" if times[origin.name] > 1 and origin.namespace else origin.name
        if name not in origins:  # Codex repeats its additional tools in each item
            origins[name] = origin
            tools.append(ClientTool(name=name, description=tool.description, parameters=tool.parameters))
    return Tools(tuple(tools), origins, tuple(vendors))


def _flat(
    entries: Sequence[dict[str, Any]], field: str, namespace: str = ""
) -> Iterator[tuple[str, Origin, ClientTool | None]]:
    """Type, origin and tool of each entry. A tool of a type that the client does not run is None."""
    for index, entry in enumerate(entries):
        kind, place = str(entry.get("type")), f"{field}[{index}]"
        if kind == "namespace":
            yield from _flat(
                base.objects(entry.get("tools"), f"{place}.tools"), place, base.string(entry.get("name"), place)
            )
        elif kind == "function":
            tool = base.tool_of(entry, "parameters", place)
            yield kind, Origin(tool.name, namespace), tool
        elif kind == "custom":
            tool = base.tool_of({"name": entry.get("name"), "description": _described(entry)}, "", place)
            schema: dict[str, object] = {
                "type": "object",
                "properties": {INPUT: {"type": "string"}},
                "required": [INPUT],
            }
            yield (
                kind,
                Origin(tool.name, namespace, custom=True),
                ClientTool(name=tool.name, description=tool.description, parameters=schema),
            )
        else:
            yield kind, Origin(""), None


def _described(entry: dict[str, Any]) -> str:
    """A custom tool's description, and the grammar of its text."""
    text = base.string(entry.get("description"), "tools.description")
    form = entry.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    return f"{text}\n\nGrammar of {INPUT}:\n{grammar}".strip() if isinstance(grammar, str) else text


def custom_arguments(item: Body, field: str) -> str:
    """The arguments of a custom call of the history."""
    return json.dumps({INPUT: base.string(item.get("input"), f"{field}.input")}, ensure_ascii=False)


def call_item(call: ClientCall, origin: Origin, id: str) -> dict[str, Any]:
    """The output item of a call that the policy made."""
    place = {"namespace": origin.namespace} if origin.namespace else {}
    item = {"id": id, "status": "completed", "call_id": call.id, "name": origin.name} | place
    if not origin.custom:
        return item | {"type": "function_call", "arguments": call.arguments}
    given = json.loads(call.arguments).get(INPUT, "")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return item | {"type": "custom_tool_call", "input": base.plain(text, INPUT)}
