"""A streamed answer is the answer: in every dialect, for any parts, also when parts are lost."""

import json
import random

import msgspec
import pytest

from headrace.gateway.conversation import ModelReply, ModelRequest, Origin
from headrace.gateway.dialects.keys import TABLES
from headrace.gateway.dialects.writer import BrokenStream, Head
from headrace.gateway.endpoints import DIALECTS
from headrace.messages.product import ClientCall, ClientTurnPart, ClientUsage
from tests.support.events import events, streamed, whole

BY_PATH = {dialect.path: dialect for dialect in DIALECTS if dialect.path in TABLES}
WORDS = ("a", " ü🦉", "\n", "\n\n", "{", '"', "\\", "</tool_call>", " ", "\t", "data: x\n\n", "\u2028")
HEAD = Head(id="t1", model="latest", created=1)
REQUEST = ModelRequest(
    model="latest",
    messages=(),
    stream=True,
    include_usage=True,
    origins={"patch": Origin("apply_patch", custom=True)},
)


def text(rng: random.Random, most: int = 8) -> str:
    """Text without white space at its ends, as a turn's texts are."""
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(most))).strip()


def reply(rng: random.Random) -> ModelReply:
    calls = []
    for index in range(rng.choice((0, 0, 1, 1, 2, 3))):
        custom = rng.random() < 0.3
        arguments = {"input": text(rng)} if custom else {f"k{n}": text(rng) for n in range(rng.randrange(3))}
        written = json.dumps(arguments, ensure_ascii=False)
        calls.append(ClientCall(id=f"call_{index}", name="patch" if custom else "read", arguments=written))
    return ModelReply(
        id="t1",
        model="latest",
        created=1,
        session="u.s",
        thinking=text(rng),
        text=text(rng),
        calls=tuple(calls),
        after=text(rng, 3) if calls else "",
        stop=rng.choice(("length", "calls" if calls else "stop")),
        usage=ClientUsage(prompt=9, cached=4, sampled=7),
    )


def parts(rng: random.Random, made: ModelReply) -> list[ClientTurnPart]:
    """The reply in pieces: the thinking, the text, the calls; up to any point."""
    pieces: list[tuple[str, str, ClientCall | None]] = []

    def cut(whole: str) -> list[str]:
        places = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(4)))
        return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]

    pieces += [(piece, "", None) for piece in cut(made.thinking)]
    pieces += [("", piece, None) for piece in cut(made.text)]
    for call in made.calls:
        pieces += [("", "", msgspec.structs.replace(call, arguments=piece)) for piece in cut(call.arguments)]
    usage, out = ClientUsage(prompt=9, cached=4), []
    for number, (thinking, said, begun) in enumerate(pieces[: rng.randrange(len(pieces) + 1)]):
        calls = () if begun is None else (begun,)
        out.append(ClientTurnPart(number=number, usage=usage, thinking=thinking, text=said, calls=calls))
    return out


@pytest.mark.parametrize("path", BY_PATH)
def test_the_stream_is_the_answer(path: str) -> None:
    rng = random.Random(path)
    for _ in range(120):
        made = reply(rng)
        sent = parts(rng, made)
        lost = rng.randrange(len(sent) + 1) if rng.random() < 0.3 else len(sent)
        writer = BY_PATH[path].writer(REQUEST, HEAD)
        data = b"".join(b"".join(writer.part(part)) for part in (*sent[:lost], *sent[lost + 1 :]))
        data += b"".join(writer.end(made))
        assert streamed(path, data) == whole(path, BY_PATH[path].reply([made], REQUEST))


@pytest.mark.parametrize("path", BY_PATH)
def test_a_call_that_turned_out_to_be_malformed_ends_the_stream(path: str) -> None:
    """A client must not run a call that the whole answer does not have."""
    usage = ClientUsage(prompt=9)
    begun = ClientCall(id="call_0", name="read", arguments='{"path": "/t')
    note = "[a tool call that cannot be read: the call is not closed]"
    malformed = ModelReply(id="", model="", created=1, session="s", text=f"I look.\n{note}", usage=usage)
    writer = BY_PATH[path].writer(REQUEST, HEAD)
    list(writer.part(ClientTurnPart(number=0, usage=usage, text="I look.", calls=(begun,))))
    with pytest.raises(BrokenStream):
        list(writer.end(malformed))
    last = list(events(b"".join(writer.fail(502, "no"))))[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == "no"
    assert last.get("type") == {"/v1/responses": "response.failed", "/v1/messages": "error"}.get(path)


@pytest.mark.parametrize("path", BY_PATH)
def test_a_turn_that_its_limit_cuts_inside_a_call_says_so(path: str) -> None:
    usage = ClientUsage(prompt=9)
    begun = ClientCall(id="call_0", name="read", arguments='{"path": "/t')
    cut = ModelReply(id="", model="", created=1, session="s", text="I look.\n[cut]", stop="length", usage=usage)
    writer = BY_PATH[path].writer(REQUEST, HEAD)
    data = b"".join(writer.part(ClientTurnPart(number=0, usage=usage, text="I look.", calls=(begun,))))
    told = list(events(data + b"".join(writer.end(cut))))
    if path == "/v1/chat/completions":
        assert [c["choices"][0]["finish_reason"] for c in told if c["choices"]][-1] == "length"
    elif path == "/v1/messages":
        assert told[-2]["delta"]["stop_reason"] == "max_tokens"
    else:
        items = told[-1]["response"]["output"]
        assert [item["status"] for item in items] == ["completed", "incomplete", "completed"]
        assert items[1]["arguments"] == begun.arguments
        assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    texts = [json.dumps(each, ensure_ascii=False) for each in told]
    assert sum("[cut]" in each for each in texts[:-1]) >= 1
