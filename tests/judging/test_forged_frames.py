"""Any bytes that a candidate's process writes on its channel end in an outcome that is no pass."""

import asyncio
import json
import random
import socket
import struct
from typing import Any

import pytest

from headrace.judging.outcomes import NAME, TESTS, RefusedOutput, read
from headrace.judging.verdicts import all_passed
from headrace.messages import sandbox, tasks
from headrace.messages.codec import encode
from headrace.messages.sandbox import OpResult, RunTests, SandboxLost, SandboxReply
from headrace.tasks.sealing import compare_answers
from headrace.vmhost.channel import Channel
from headrace.vmhost.guest.frames import Garbage, pack
from headrace.vmhost.guest.testing.observing import LIMIT
from headrace.vmhost.protocol import to_frame, to_result

pytestmark = pytest.mark.anyio

EXPECTED = ("test_hidden.py::test_a",)
ANSWERS = {EXPECTED[0]: ((0, "0x5eed5eed5eed5eed"),)}


def judged(header: dict[str, Any], bodies: list[bytes]) -> bool:
    """The judge's reading of an answer, by way of the reply that carries it to the judge."""
    result = to_result(header, bodies, 1.0)
    payload, _ = encode(SandboxReply(result=result))
    assert payload
    tests = compare_answers(read(result), ANSWERS)
    return all_passed(tests, EXPECTED)


def forged(random_: random.Random) -> bytes:
    """Bytes that a hostile process sends as the answer of call 1."""
    odd: list[Any] = [None, True, -1, 10**30, 1e308, "", "\ud800", "passed", [], {}, [[]], "x" * 5000, {"a": "b"}]
    wrong = [
        '[0, ["t", [["f", 1' + "0" * 400 + "]]]]",
        '[0,["n"]]',
        "\ud800",
        "[" * 9000,
        '[0,["t",[["i","0x1"]]]]',
        "",
    ]

    def field(usual: list[Any]) -> Any:
        return random_.choice(odd) if random_.random() < 0.05 else random_.choice(usual)

    row = [
        field([EXPECTED[0], "other"]),
        field(["passed", "passed", "failed"]),
        field(["", "\ud800", "m" * 5000]),
        field([[], [random_.choice(wrong)], [random_.choice(wrong)], wrong]),
    ]
    rows = [row[: random_.choice([4, 4, 4, 4, 4, 4, 4, 3])]] * random_.choice([1, 1, 1, 0, 3])
    header: dict[str, Any] = {"i": 1, "tests": field([rows])}
    for key in ("ok", "error", "code", "stdout", "data", "paths", "digest", "timed_out", "truncated", "job", "running"):
        if random_.random() < 0.05:
            header[key] = random_.choice([*odd, 0, 1, 2**63, 2**64, -(2**70)])
    kind = random_.randrange(8)
    if kind == 0:
        text = json.dumps(header | {"#": random_.choice([*odd, [-1], [1 << 40], [0, 0]])}).encode(
            "utf-8", "surrogatepass"
        )
        return struct.pack("!II", 4 + len(text), len(text)) + text
    if kind == 1:
        text = random_.choice([b"[" * 50_000, b"\xff\xfe{}", b'{"#":[],"i":NaN}', b'{"#":[]} x', b"1" * 5000, b""])
        return struct.pack("!II", 4 + len(text), len(text)) + text
    if kind == 2:
        return (
            struct.pack("!II", random_.choice([0, 3, 1 << 31, (1 << 32) - 1]), random_.choice([0, 1 << 31])) + b"junk"
        )
    data = pack(header, [b"\xff" * random_.randrange(4)] * random_.randrange(2))
    if kind == 3:
        at = random_.randrange(8, len(data))
        return data[:at] + bytes([random_.randrange(256)]) + data[at + 1 :]
    return data


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.slow)], ids=["some", "many"])
async def test_a_forged_frame_is_an_outcome(count: int) -> None:
    random_ = random.Random(2026)
    ends = {"lost": 0, "garbage": 0, "refused": 0, "not passed": 0}
    for _ in range(count):
        host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = await Channel.connect(host, "forger")
        header, bodies = to_frame(RunTests(plan=tasks.TestPlan(paths=("test_hidden.py",))))
        call = asyncio.ensure_future(channel.call(header, bodies, timeout=60.0))
        await asyncio.sleep(0)
        guest.sendall(forged(random_))
        guest.shutdown(socket.SHUT_WR)
        try:
            passed = judged(*await call)
            assert not passed
            ends["not passed"] += 1
        except SandboxLost:
            ends["lost"] += 1
        except Garbage:
            ends["garbage"] += 1
        except RefusedOutput:
            ends["refused"] += 1
        finally:
            channel.close("the test is over")
            guest.close()
            await channel.ended
    assert sum(ends.values()) == count
    assert ends["lost"] > count // 20 and ends["garbage"] > count // 20 and ends["not passed"] > count // 20


def test_a_report_outside_the_bounds_is_refused_and_a_long_message_is_cut() -> None:
    many = OpResult(tests=tuple(sandbox.TestOutcome(str(n), "passed") for n in range(TESTS + 1)))
    with pytest.raises(RefusedOutput, match=f"{TESTS + 1} tests are reported; a run has at most {TESTS}"):
        read(many)
    half = "x" * (LIMIT // 2)
    with pytest.raises(RefusedOutput, match="characters of observations"):
        read(OpResult(tests=(sandbox.TestOutcome("a", "passed", "", (half, half, "y")),)))
    assert read(OpResult(tests=(sandbox.TestOutcome("a", "passed", "", (half, half)),)))
    with pytest.raises(RefusedOutput, match=f"at most {NAME} are read"):
        read(OpResult(tests=(sandbox.TestOutcome("n" * (NAME + 1), "passed"),)))
    assert len(read(OpResult(tests=(sandbox.TestOutcome("a", "failed", "m" * 10_000),)))[0].message) == 2_000
