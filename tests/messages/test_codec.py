"""Messages to bytes and back, and what is refused on the way."""

import os

import pytest
from msgspec import msgpack

from headrace.messages import TYPES, Array, UnreadableMessage, decode, decode_as, encode
from headrace.messages.operations import Ack, Event, Heartbeat
from headrace.messages.rollout import Span, Turn, TurnSampled


def turn() -> Turn:
    return Turn(
        index=0,
        segment=0,
        prompt_ids=Array.of(range(300), "<i4"),
        ids=Array.of([5, 6, 7], "<i4"),
        logprobs=Array.of([-0.5, -1.25, 0.0], "<f4"),
        routed=Array.of([1, 2, 3, 4], "|u1", (2, 1, 2)),
        spans=(Span(0, 302, 4),),
    )


def test_round_trip_with_arrays() -> None:
    message = TurnSampled(run="r1", trajectory="g1-0-0", turn=turn())
    payload, headers = encode(message)
    assert headers == {"Hr-Type": "turn_sampled/1"}
    back = decode(payload, headers)
    assert back == message
    assert isinstance(back, TurnSampled) and back.turn.logprobs.tolist() == [-0.5, -1.25, 0.0]
    assert back.turn.routed is not None and back.turn.routed.shape == (2, 1, 2)


def test_text_is_compressed_and_noise_is_not() -> None:
    text = Event(actor="a", id="a", kind="k", text="the same words again and again. " * 500)
    noise = Event(actor="a", id="a", kind="k", text=os.urandom(8000).hex()[:8000])
    packed, headers = encode(text)
    assert headers["Hr-Encoding"] == "lz4" and len(packed) < 2000
    assert decode(packed, headers) == text
    raw = Array.of(os.urandom(8192), "|u1")
    payload, headers = encode(TurnSampled(run="r", trajectory="t", turn=_with(raw)))
    assert "Hr-Encoding" not in headers and len(payload) > 8192
    payload, headers = encode(noise)
    assert decode(payload, headers) == noise


@pytest.mark.parametrize(
    ("text", "noise", "packed"), [(1 << 20, 0, True), (1 << 18, 1 << 20, True), (0, 1 << 20, False)]
)
def test_of_a_large_payload_samples_say_whether_it_shrinks(text: int, noise: int, packed: bool) -> None:
    bytes_ = b"the same words again and again. " * (text // 32) + os.urandom(noise)
    message = TurnSampled(run="r", trajectory="t", turn=_with(Array.of(bytes_, "|u1")))
    payload, headers = encode(message)
    assert ("Hr-Encoding" in headers) == packed
    assert decode(memoryview(payload), headers) == message


def _with(routed: Array) -> Turn:
    import msgspec

    return msgspec.structs.replace(turn(), routed=routed)


def test_unknown_fields_are_tolerated() -> None:
    payload = msgpack.encode({"ok": False, "detail": "x", "from_the_future": [1, 2]})
    assert decode(payload, {"Hr-Type": "ack/1"}) == Ack(ok=False, detail="x")


@pytest.mark.parametrize(
    ("payload", "headers", "words"),
    [
        (b"\x80", {}, "unknown message type ''"),
        (b"\x80", None, "unknown message type ''"),
        (b"\x80", {"Hr-Type": "nothing/1"}, "unknown message type 'nothing/1'"),
        # A type that was removed: its records are in the streams of older runs.
        (
            b"\x81\xa3run\xa1r",
            {"Hr-Type": "search_adapter_version/1"},
            "unknown message type 'search_adapter_version/1'",
        ),
        (b"\x80", {"Hr-Type": "ack/9"}, "newer than this reader, which reads up to ack/1"),
        (b"\x80", {"Hr-Type": "ack"}, "newer than this reader|expected ack/<version>"),
        (b"\xc1", {"Hr-Type": "ack/1"}, "not a readable ack"),
        (b"\x81\xa2ok\xa1x", {"Hr-Type": "ack/1"}, "not a readable ack"),
        (b"\x80", {"Hr-Type": "ack/1", "Hr-Encoding": "zstd"}, "unknown encoding 'zstd'"),
        (b"no frame", {"Hr-Type": "ack/1", "Hr-Encoding": "lz4"}, "not a readable ack"),
        (b"\x80", {"Hr-Type": "beat/1"}, "not a readable beat"),
    ],
)
def test_what_cannot_be_read_says_why(payload: bytes, headers: dict[str, str] | None, words: str) -> None:
    with pytest.raises(UnreadableMessage, match=words):
        decode(payload, headers)


def test_arrays_refuse_a_wrong_size_and_values_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"array of <i4\[3\] needs 12 bytes, got 8"):
        Array("<i4", (3,), b"12345678")
    with pytest.raises(OverflowError):
        Array.of([300], "|u1")
    broken = msgpack.encode({"dtype": "<i4", "shape": [3], "data": b"1"})
    with pytest.raises(UnreadableMessage):
        decode_as(TurnSampled, broken)


def test_every_type_is_registered_once_and_frozen() -> None:
    assert {"rollout_request", "trajectory", "score", "step_done", "weight_head", "event"} <= set(TYPES)
    for name, cls in TYPES.items():
        assert cls.type_name == name and cls.__struct_config__.frozen, name
    with pytest.raises(AttributeError):
        Heartbeat(actor="a", id="a", node="n", pid=1, state="running").pid = 2  # type: ignore[misc]


def test_a_struct_that_is_no_message_is_refused() -> None:
    from headrace.messages.base import Message

    class Plain(Message, frozen=True):
        pass

    with pytest.raises(TypeError, match="Plain is not a registered message"):
        encode(Plain())
