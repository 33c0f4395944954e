"""Forced calls, stops, samples, log-probabilities, and turns that are named instead of sent, through the whole path."""

import base64
import json
import secrets
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.actors.rollout import spans
from headrace.actors.rollout.actor import Rollout
from headrace.config import Engine
from headrace.engines.base import Engine as Sampler
from headrace.engines.base import Sample, SampleRequest
from headrace.messages.rollout import TurnSampled
from headrace.messages.subjects import TURN
from headrace.policy.routes import in_memory
from headrace.registry import admit
from headrace.rendering.tokenizer import Tokenizer
from tests.actors.rollout.test_client_turns import TOOL, Client, client_of, config, model, run
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.chat_formats import tokenizer_json
from tests.support.client_engine import PLAYS, Play, Script
from tests.support.events import events, streamed, whole

__all__ = ["model", "run"]
pytestmark = pytest.mark.anyio
ENGINE = "tests.support.client_engine:open_engine"

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": "mean of xs"}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture
async def client(connect: Connect, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    seeds = iter(range(10_000))
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(seeds) if bits == 31 else bits)
    async with (
        client_of(config(tmp_path), connect, tmp_path, run) as opened,
        living(Rollout, config(tmp_path), await connect("rollout", node="n1"), run, "product"),
    ):
        yield opened


async def post(client: Client, path: str, status: int = 200, **body: Any) -> tuple[dict[str, Any], str]:
    """The answer and its session."""
    async with client.http.post(client.url + path, json={"model": "latest"} | body) as answer:
        data = await answer.json()
        assert answer.status == status, data
        return data, answer.headers.get("X-Headrace-Session", "")


async def records(connect: Connect, run: str) -> dict[str, list[TurnSampled]]:
    """The recorded turns of each session."""
    by_session: dict[str, list[TurnSampled]] = {}
    async for received in (await connect("admin")).history("HR_TURN", TURN.where(run=run, trajectory=">")):
        if isinstance(received.message, TurnSampled):
            by_session.setdefault(received.message.trajectory.removesuffix("-0-0"), []).append(received.message)
    return by_session


def ids(record: TurnSampled) -> tuple[list[int], list[int]]:
    return [int(id) for id in record.turn.prompt_ids.tolist()], [int(id) for id in record.turn.ids.tolist()]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.parse(tokenizer_json())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [
        (CHAT, [{"type": "function", "function": TOOL}], "required"),
        (CHAT, [{"type": "function", "function": TOOL}], {"type": "function", "function": {"name": "read"}}),
        (MESSAGES, [{"name": "read", "input_schema": TOOL["parameters"]}], {"type": "any"}),
        (RESPONSES, [{"type": "function", **TOOL}], {"type": "function", "name": "read"}),
    ],
)
async def test_a_forced_call_begins_in_the_prompt_and_is_the_answer(
    connect: Connect,
    client: Client,
    run: str,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    tools: list[Any],
    choice: Any,
    stream: bool,
) -> None:
    """The policy of the test would not finish a call by itself, so the ids that it samples are replaced."""
    sample = spans.sample

    async def dictated(engine: Sampler, request: SampleRequest, trajectory: str) -> Sample:
        made = await sample(engine, msgspec.structs.replace(request, progress=None), trajectory)
        end = 'read", "arguments": {"path": "a.py"}}\n</tool_call>'
        begun = tokenizer.decode(request.ids)
        behind = begun[begun.rindex("<tool_call>") :]
        whole = '<tool_call>\n{"name": "' + end
        assert whole.startswith(behind), behind
        written = (*tokenizer.encode(whole[len(behind) :]), request.stop_ids[0])
        span = msgspec.structs.replace(made.spans[-1], end=len(request.ids) + len(written) - 1)
        return msgspec.structs.replace(
            made, ids=written, logprobs=(-1.0,) * len(written), spans=(span,), stop="stop", routed=None
        )

    monkeypatch.setattr(spans, "sample", dictated)
    body: dict[str, Any] = {"tools": tools, "tool_choice": choice, "stream": stream, "max_tokens": 12}
    body |= {"input" if path == RESPONSES else "messages": SAID}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    if path == CHAT:
        body["stream_options"] = {"include_usage": True}
    async with client.http.post(client.url + path, json={"model": "latest"} | body) as answer:
        data = await answer.read()
        assert answer.status == 200, data
        session = answer.headers["X-Headrace-Session"]
    got = streamed(path, data) if stream else whole(path, json.loads(data))
    assert [(name, json.loads(arguments)) for _, name, arguments in got.calls] == [("read", {"path": "a.py"})]
    assert not got.text
    (record,) = (await records(connect, run))[session]
    assert record.turn.forced > 0 and [call.name for call in record.turn.calls] == ["read"]
    assert len(ids(record)[1]) == record.turn.kinds.calls + 1, "the stop is no part of the call"  # type: ignore[union-attr]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_turn_ends_before_its_stop_streamed_or_not(
    connect: Connect, client: Client, run: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: 11)
    plain, first = await post(client, path, messages=SAID, max_tokens=12)
    text = whole(path, plain).text
    stop = text[len(text) // 2 :][:2]
    key = {CHAT: "stop", MESSAGES: "stop_sequences"}[path]
    sessions, answers = [], []
    for stream in (False, True):
        body = {"model": "latest", "messages": SAID, key: [stop, "never written"], "max_tokens": 12, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if path == CHAT else {}
        async with client.http.post(client.url + path, json=body) as answer:
            data = await answer.read()
            assert answer.status == 200, data
            sessions.append(answer.headers["X-Headrace-Session"])
        answers.append(streamed(path, data) if stream else whole(path, json.loads(data)))
        ends = list(events(data)) if stream else [json.loads(data)]
        if path == MESSAGES:
            told = ends[-2]["delta"] if stream else ends[0]
            assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert {each.text for each in answers} == {text[: text.index(stop)].rstrip()} != {text}
    turns_of = await records(connect, run)
    turns = [turns_of[session][0].turn for session in sessions]
    assert turns[0] == turns[1], "the record does not depend on when the engine was cut"
    count = len(turns[0].ids)
    unstopped = ids(turns_of[first][0])[1]
    assert 0 < count < len(unstopped) and turns[0].ids.tolist() == unstopped[:count]
    assert stop in tokenizer.decode(ids(turns_of[sessions[0]][0])[1])
    assert stop not in tokenizer.decode(ids(turns_of[sessions[0]][0])[1][:-1])
    assert turns[0].spans[-1].end == len(turns[0].prompt_ids) + count - 1
    more = [*SAID, {"role": "assistant", "content": answers[0].text}, {"role": "user", "content": "go on"}]
    headers = {"X-Headrace-Session": sessions[0]}
    client.http.headers.update(headers)
    assert (await post(client, path, messages=more, max_tokens=4))[1] == sessions[0], "the session goes on"


async def test_samples_side_by_side_are_branches_of_one_tree(client: Client) -> None:
    client.http.headers["Idempotency-Key"] = "one"
    answer, session = await post(client, CHAT, messages=SAID, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len({*texts}) == 3
    assert answer["usage"]["completion_tokens"] > 12
    again, _ = await post(client, CHAT, messages=SAID, n=3)
    assert [choice["message"]["content"] for choice in again["choices"]] == texts, "the recorded turns"
    async with client.http.get(f"{client.url}/v1/sessions/{session}") as told:
        assert len((await told.json())["branches"]) == 2
    del client.http.headers["Idempotency-Key"]
    assert "with stream" in (await post(client, CHAT, 400, messages=SAID, n=2, stream=True))[0]["error"]["message"]
    assert "1 to 8" in (await post(client, CHAT, 400, messages=SAID, n=9))[0]["error"]["message"]


async def test_log_probabilities_are_those_of_the_record(connect: Connect, client: Client, run: str) -> None:
    answer, session = await post(client, CHAT, messages=SAID, logprobs=True)
    told = answer["choices"][0]["logprobs"]["content"]
    (record,) = (await records(connect, run))[session]
    assert [each["logprob"] for each in told] == record.turn.logprobs.tolist()[: len(told)] and len(told) > 3
    body = {"model": "latest", "messages": SAID, "logprobs": True, "stream": True}
    async with client.http.post(client.url + CHAT, json=body) as stream:
        parts = list(events(await stream.read()))
        session = stream.headers["X-Headrace-Session"]
    content = [
        each for part in parts for each in ((part["choices"] or [{}])[0].get("logprobs") or {}).get("content", ())
    ]
    (record,) = (await records(connect, run))[session]
    assert [each["logprob"] for each in content] == record.turn.logprobs.tolist()[: len(content)] and content
    answer, session = await post(client, RESPONSES, input="x", include=["message.output_text.logprobs"])
    (record,) = (await records(connect, run))[session]
    told = answer["output"][-1]["content"][0]["logprobs"]
    assert [each["logprob"] for each in told] == record.turn.logprobs.tolist()[: len(told)] and told
    plain, _ = await post(client, CHAT, messages=SAID)
    assert plain["choices"][0]["logprobs"] is None


async def test_a_response_is_gone_on_with_by_its_id(connect: Connect, client: Client, run: str) -> None:
    """A client that sends its history gets the same ids; nothing is encoded again, also in a branch."""
    tools = [{"type": "function", **TOOL}]
    first, session = await post(client, RESPONSES, input=SAID, tools=tools)
    second, again = await post(
        client, RESPONSES, input="go on", tools=tools, previous_response_id=first["id"], max_output_tokens=4
    )
    assert again == session and second["id"] != first["id"]
    fork, branch = await post(client, RESPONSES, input="or else", tools=tools, previous_response_id=first["id"])
    _, at = await post(client, RESPONSES, input="and on", tools=tools, previous_response_id=fork["id"])
    assert branch.startswith(f"{session}-") and at == branch
    turns_of = await records(connect, run)
    (start, sampled), (more, _) = (ids(record) for record in turns_of[session])
    (forked, _), (_, _) = (ids(record) for record in turns_of[branch])
    assert forked[: len(start) + len(sampled)] == start + sampled, "the ids of the record, not their text"
    told = [*SAID, *first["output"], {"role": "user", "content": "go on"}]
    client.http.headers["X-Headrace-Session"] = session
    _, sent = await post(client, RESPONSES, input=told, tools=tools)
    stateless = ids((await records(connect, run))[sent][-1])[0]
    assert stateless[-len(more) :] == more, "what follows the turn is what a whole history gives"
    text = "expected the previous response's tools"
    wrong, _ = await post(client, RESPONSES, 400, input="x", previous_response_id=first["id"])
    assert text in wrong["error"]["message"]
    gone = first["id"].rpartition("_")[0] + "_77"
    assert (
        "is gone" in (await post(client, RESPONSES, 404, input="x", previous_response_id=gone))[0]["error"]["message"]
    )


async def test_a_streamed_response_has_the_id_of_its_turn(client: Client) -> None:
    body = {"model": "latest", "input": SAID, "stream": True}
    async with client.http.post(client.url + RESPONSES, json=body) as answer:
        told = list(events(await answer.read()))
        session = answer.headers["X-Headrace-Session"]
    names = {event["response"]["id"] for event in told if "response" in event}
    assert names == {f"resp_{session.replace('.', '_')}_0"}
    _, again = await post(client, RESPONSES, input="go on", previous_response_id=names.pop())
    assert again == session


async def test_an_item_is_named_by_its_id(client: Client) -> None:
    first, session = await post(client, RESPONSES, input=SAID)
    named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    _, again = await post(client, RESPONSES, input=[*SAID, *named, {"role": "user", "content": "go on"}])
    assert again == session, "the history reaches its session"
    other = "0" * 20 + session[20:].replace(".", "_")
    wrong = [*SAID, {"type": "item_reference", "id": f"msg_{other}_0"}]
    await post(client, RESPONSES, 404, input=wrong)


@pytest.mark.parametrize("referred", [("message",), ("function_call",), ("message", "function_call"), ("second",)])
async def test_items_of_one_turn_may_be_named_and_sent(
    connect: Connect, run: str, tmp_path: Path, referred: tuple[str, ...]
) -> None:
    """The AI SDK names a turn's text by its id and sends the turn's calls."""
    admit("engines", [ENGINE])
    made = msgspec.structs.replace(config(tmp_path), engine=Engine(kind=ENGINE))
    calls = [("read", {"path": path}) for path in ("a.py", "b.py")]
    PLAYS.append(play := Play(Script("mean of xs", [("I read both.", calls), ("Done.", [])])))
    async with (
        client_of(made, connect, tmp_path, run) as client,
        living(Rollout, made, await connect("rollout", node="n1"), run, "product"),
    ):
        asked: dict[str, Any] = {"tools": [{"type": "function", **TOOL}]}
        first, session = await post(client, RESPONSES, input=SAID, **asked)
        items = first["output"]
        assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
        named = [item["type"] in referred or (item is items[2] and "second" in referred) for item in items]
        sent = [
            {"type": "item_reference", "id": item["id"]} if by_id else item
            for item, by_id in zip(items, named, strict=True)
        ]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in items[1:]]
        last, again = await post(client, RESPONSES, input=[*SAID, *sent, *results], **asked)
    assert last["output"][0]["content"][0]["text"] == "Done." and again == session
    assert play.sessions == [session, session]


async def test_a_history_is_summed_up(connect: Connect, client: Client, run: str) -> None:
    compacted, _ = await post(client, "/v1/responses/compact", input=SAID)
    assert compacted["object"] == "response.compaction"
    user, item = compacted["output"]
    assert user["content"][0]["text"] == "mean of xs" and item["type"] == "compaction"
    await post(client, RESPONSES, input=[user, item, {"role": "user", "content": "go on"}])
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    answer, _ = await post(client, RESPONSES, 400, input=[foreign, *SAID])
    assert "another server" in answer["error"]["message"]


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": TOOL}]])
async def test_an_engine_without_a_grammar_refuses_a_format(client: Client, tools: list[Any]) -> None:
    answer, _ = await post(client, CHAT, 400, messages=SAID, response_format=FORM, tools=tools)
    assert "no grammar" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_its_format_behind_calls_that_no_grammar_chose(
    connect: Connect, run: str, tmp_path: Path, stream: bool
) -> None:
    admit("engines", [ENGINE])
    made = msgspec.structs.replace(config(tmp_path), engine=Engine(kind=ENGINE))
    turns = [("I read it.", [("read", {"path": "a.py"})]), ("It has no form.", [])]
    PLAYS.append(play := Play(Script("mean of xs", turns, '{"a": 1}')))
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}], "response_format": FORM}
    asked |= {"model": "latest", "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    said: list[dict[str, Any]] = [*SAID]
    async with (
        client_of(made, connect, tmp_path, run) as client,
        living(Rollout, made, await connect("rollout", node="n1"), run, "product"),
    ):
        for _ in range(2):
            async with client.http.post(client.url + CHAT, json=asked | {"messages": said}) as answer:
                data = await answer.read()
                assert answer.status == 200, data
            got = streamed(CHAT, data) if stream else whole(CHAT, json.loads(data))
            for id, name, arguments in got.calls:
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                said.append({"role": "assistant", "content": got.text, "tool_calls": [call]})
                said.append({"role": "tool", "tool_call_id": id, "content": "x"})
    assert got.text == '{"a": 1}' and not got.calls
    assert len({*play.sessions}) == 1 and len(play.sessions) == 2
    first, last = (await records(connect, run))[play.sessions[0]]
    assert [call.name for call in first.turn.calls] == ["read"] and not last.turn.calls


async def test_a_trainer_outside_reads_the_tokens_of_the_record(client: Client, connect: Connect, run: str) -> None:
    body = {"logprobs": True, "return_token_ids": True}
    first, session = await post(client, CHAT, messages=SAID, **body)
    more = [*SAID, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, *SAID]
    again, _ = await post(client, CHAT, messages=more, **body)
    asked = {"messages": SAID, "stream": True, "user": "b"} | body
    async with client.http.post(client.url + CHAT, json=asked) as answer:
        (last,) = (part for part in events(await answer.read()) if "prompt_token_ids" in part)
    by_session = await records(connect, run)
    one, two = by_session.pop(session)
    (other,) = by_session.popitem()[1]
    before: list[int] = []
    for record, told in ((one, first), (two, again), (other, last)):
        prompt, sampled = ids(record)
        before = [*(before if record is two else []), *prompt]
        (choice,) = told["choices"]
        assert told["prompt_token_ids"] == before and choice["token_ids"] == sampled
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [f"token_id:{id}" for id in sampled]
        assert [each["logprob"] for each in content] == record.turn.logprobs.tolist()
        assert set(choice["token_versions"]) == {0} and len(choice["token_versions"]) == len(sampled)
        routes = np.load(BytesIO(base64.b64decode(choice["routed_experts"])))
        assert routes.shape[0] == len(before) + len(sampled) - 1
        routed = in_memory(record.turn).routed
        assert routed is not None
        rows = np.frombuffer(routed.data, routed.dtype).reshape(routed.shape)
        np.testing.assert_array_equal(routes[record.turn.first_routed :], rows)
        before += sampled
