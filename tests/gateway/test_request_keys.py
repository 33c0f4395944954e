"""Each key of a request is honoured, refused, or left out and named."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.gateway.dialects.base import Unusable
from headrace.gateway.dialects.chat import ChatCompletions
from headrace.gateway.dialects.keys import NOTHING, TABLES
from headrace.gateway.dialects.messages import Messages
from headrace.gateway.dialects.responses import Responses
from headrace.messages.product import TurnPlace
from tests.support.clients import Served, endpoints, two_reads

DIALECTS = {dialect.path: dialect for dialect in (ChatCompletions(), Responses(), Messages())}
SAID = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {path: {"messages": SAID, "input": SAID} for path in DIALECTS}
for path, body in BODIES.items():
    body.pop("messages" if path == "/v1/responses" else "input")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with endpoints(tmp_path, two_reads) as started:
        yield started


@pytest.mark.parametrize("path", DIALECTS)
def test_a_refused_key_is_named_and_its_neutral_values_pass(path: str) -> None:
    for name, key in TABLES[path].items():
        if key.policy == "refused":
            for neutral in (*NOTHING, *key.neutral):
                assert DIALECTS[path].request(BODIES[path] | {name: neutral}).left_out == ()
            for asked in ("x", 7, True, ["x"], {"x": 1}):
                with pytest.raises(Unusable) as refused:
                    DIALECTS[path].request(BODIES[path] | {name: asked})
                assert refused.value.field == name


@pytest.mark.parametrize("path", DIALECTS)
def test_what_nothing_honours_is_named(path: str) -> None:
    harmless = [name for name, key in TABLES[path].items() if key.policy == "left out"]
    body = BODIES[path] | dict.fromkeys([*harmless, "unheard_of"], 0.5)
    assert DIALECTS[path].request(body).left_out == tuple(sorted([*harmless, "unheard_of"]))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMATS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ),
    ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
    ("/v1/messages", "output_config", {"format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/v1/messages", "output_format", {"type": "json_schema", "schema": SCHEMA}),
]
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "read"}},
    "/v1/responses": {"type": "function", "name": "read"},
    "/v1/messages": {"name": "read", "input_schema": {}},
}


@pytest.mark.parametrize(("path", "key", "form"), FORMATS)
def test_an_answer_keeps_the_schema_of_its_request(path: str, key: str, form: dict[str, Any]) -> None:
    assert DIALECTS[path].request(BODIES[path]).answer == ""
    assert json.loads(DIALECTS[path].request(BODIES[path] | {key: form}).answer) == SCHEMA
    inside = form.get("format", form)
    bad: tuple[Any, ...] = ("x", {"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "schema": "x"})
    for wrong in bad if inside is not form else bad[1:]:
        with pytest.raises(Unusable):
            DIALECTS[path].request(BODIES[path] | {key: {"format": wrong} if inside is not form else wrong})
    asked = DIALECTS[path].request(BODIES[path] | {key: form, "tools": [TOOLS[path]]})
    assert json.loads(asked.answer) == SCHEMA and asked.tools
    none = "none" if path != "/v1/messages" else {"type": "none"}
    asked = DIALECTS[path].request(BODIES[path] | {key: form, "tools": [TOOLS[path]], "tool_choice": none})
    assert asked.answer and not asked.tools


@pytest.mark.parametrize(
    ("path", "any", "one"),
    [
        ("/v1/chat/completions", "required", {"type": "function", "function": {"name": "read"}}),
        ("/v1/responses", "required", {"type": "function", "name": "read"}),
        ("/v1/messages", {"type": "any"}, {"type": "tool", "name": "read"}),
    ],
)
def test_a_call_is_forced(path: str, any: object, one: dict[str, Any]) -> None:
    other = json.loads(json.dumps(TOOLS[path]).replace("read", "write"))
    body = BODIES[path] | {"tools": [TOOLS[path], other]}
    assert DIALECTS[path].request(body).forced == ()
    assert DIALECTS[path].request(body | {"tool_choice": any}).forced == ("read", "write")
    assert DIALECTS[path].request(body | {"tool_choice": one}).forced == ("read",)
    for wrong in (json.loads(json.dumps(one).replace("read", "none_such")), "x", {"type": "x"}, 7, {"type": ["any"]}):
        with pytest.raises(Unusable):
            DIALECTS[path].request(body | {"tool_choice": wrong})
    with pytest.raises(Unusable):
        DIALECTS[path].request(BODIES[path] | {"tool_choice": any})


@pytest.mark.parametrize(("path", "key"), [("/v1/chat/completions", "stop"), ("/v1/messages", "stop_sequences")])
def test_stop_sequences_are_texts(path: str, key: str) -> None:
    assert DIALECTS[path].request(BODIES[path] | {key: ["a", "b"]}).stops == ("a", "b")
    bad: tuple[Any, ...] = ([""], [7], 7, {}, ["x"] * 17)
    for wrong in bad:
        with pytest.raises(Unusable):
            DIALECTS[path].request(BODIES[path] | {key: wrong})


def test_an_id_names_a_recorded_turn() -> None:
    place = TurnPlace(group=f"{'a' * 20}.{'b' * 12}-{'c' * 8}", index=3)
    id = f"{'a' * 20}_{'b' * 12}-{'c' * 8}_3"
    asked = Responses().request({"input": "x", "previous_response_id": f"resp_{id}"})
    assert asked.previous == place and [said.text for said in asked.messages] == ["x"]
    items = [{"type": "item_reference", "id": f"{kind}_{id}{end}"} for kind, end in (("msg", ""), ("fc", "_0"))]
    asked = Responses().request({"input": [*SAID, *items, {"role": "user", "content": "y"}]})
    assert [said.role for said in asked.messages] == ["user", "assistant", "user"]
    assert asked.recalled == {1: (place, frozenset({"msg", "fc_0"}))}
    for wrong in ("msg_1", "", 7, f"msg_{id}_" + "x" * 3 + "!"):
        with pytest.raises(Unusable):
            Responses().request({"input": [{"type": "item_reference", "id": wrong}]})
    with pytest.raises(Unusable):
        Responses().request({"input": "x", "previous_response_id": "resp_of_another_server"})


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"parallel_tool_calls": False}),
        ("/v1/responses", {"parallel_tool_calls": False}),
        ("/v1/messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_calls_at_once_can_be_ruled_out(path: str, more: dict[str, Any]) -> None:
    assert DIALECTS[path].request(BODIES[path]).parallel
    assert not DIALECTS[path].request(BODIES[path] | more).parallel


@pytest.mark.parametrize("path", DIALECTS)
def test_an_image_does_not_end_its_session(path: str) -> None:
    """The newest message's is refused. In the history, and in the result of a tool, the model reads a placeholder."""
    words = {"/v1/chat/completions": "image_url", "/v1/responses": "input_image", "/v1/messages": "image"}
    key = "input" if path == "/v1/responses" else "messages"
    image = {"role": "user", "content": [IMAGE | {"type": words[path]}]}
    with pytest.raises(Unusable):
        DIALECTS[path].request({key: [image]})
    said = DIALECTS[path].request({key: [image, {"role": "user", "content": "x"}]}).messages
    assert [message.text for message in said] == ["[image left out: the model reads text]", "x"]


def test_a_picture_that_a_tool_read_is_a_result() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
    (said,) = Messages().request({"messages": [{"role": "user", "content": [result]}]}).messages
    assert (said.role, said.text) == ("tool", "[image left out: the model reads text]")


@pytest.mark.parametrize(
    ("id", "person"),
    [
        ("alice", "alice"),
        ('{"device_id":"d","account_uuid":"","session_id":"s"}', "d"),
        ('{"device_id":"d","account_uuid":"a","session_id":"s"}', "a"),
        ("user_d_account_a_session_s", "user_d_account_a"),
        ("[1]", "[1]"),
        ('{"name":"x"}', '{"name":"x"}'),
    ],
)
def test_a_session_is_no_person(id: str, person: str) -> None:
    assert Messages().request({"messages": SAID, "metadata": {"user_id": id}}).user == person


def test_what_changed_in_the_middle_of_a_conversation_is_a_system_message() -> None:
    said = Messages().request({"messages": [*SAID, {"role": "system", "content": "now"}]}).messages
    assert [(message.role, message.text) for message in said] == [("user", "x"), ("system", "now")]


@pytest.mark.parametrize("number", [None, 9])
def test_the_newer_limit_counts_where_it_is_given(number: int | None) -> None:
    assert ChatCompletions().request(
        {"messages": SAID, "max_tokens": 5, "max_completion_tokens": number}
    ).max_tokens == (number or 5)


@pytest.mark.parametrize("value", ["true", 1, []])
@pytest.mark.parametrize("path", DIALECTS)
def test_a_stream_is_asked_for_with_a_boolean(path: str, value: object) -> None:
    with pytest.raises(Unusable):
        DIALECTS[path].request(BODIES[path] | {"stream": value})


@pytest.mark.parametrize("bad", ["\ud800", 1 << 70])
def test_a_schema_that_no_message_can_hold_is_the_clients_fault(bad: object) -> None:
    tools = [{"type": "function", "name": "t", "parameters": {"type": "object", "default": bad}}]
    with pytest.raises(Unusable):
        Responses().request({"input": "x", "tools": tools})


NESTED = [
    {"type": "namespace", "name": "functions", "tools": [
        {"type": "custom", "name": "exec", "description": "Runs.", "format": {"type": "grammar", "definition": "G"}},
        {"type": "function", "name": "send", "parameters": {"type": "object", "properties": {}}},
    ]},
    {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "send"}]},
    {"type": "web_search"},
]  # fmt: skip


def test_tools_in_namespaces_come_back_by_their_own_names() -> None:
    """As Codex sends them for the models that it knows."""
    items: list[dict[str, Any]] = [
        {"type": "additional_tools", "role": "developer", "tools": NESTED},
        *SAID,
        {"type": "custom_tool_call", "call_id": "a", "namespace": "functions", "name": "exec", "input": "1 + 1"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "2"},
        {"type": "function_call", "call_id": "b", "namespace": "team", "name": "send", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "sent"},
    ]
    asked = Responses().request({"input": items})
    assert [tool.name for tool in asked.tools] == ["exec", "functions_send", "team_send"]
    assert asked.tools[0].parameters["required"] == ["input"] and asked.tools[0].description.endswith("G")
    calls = [(call.name, call.arguments) for message in asked.messages for call in message.calls]
    assert calls == [("exec", '{"input": "1 + 1"}'), ("team_send", "{}")]
    assert asked.left_out == ("tools.web_search",)


@pytest.mark.anyio
async def test_an_answer_names_what_was_left_out(served: Served) -> None:
    body = BODIES["/v1/chat/completions"] | {"top_p": 0.9, "service_tier": "auto", "no\nheader": 1, "stream": True}
    async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as session:
        async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
            assert answer.headers["X-Headrace-Left-Out"] == "service_tier, top_p"
            assert answer.headers["X-Accel-Buffering"] == "no"
        async with session.get(f"{served.url}/v1/models/latest") as answer:
            assert (await answer.json())["id"] == "latest"
        async with session.get(f"{served.url}/v1/models/other") as answer:
            assert answer.status == 404
