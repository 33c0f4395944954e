"""An operator's commands for dead letters: list, show, send again, settle; on an active run and on a finished one."""

import asyncio
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop

from headrace.actors.dead_letter import DeadLetter as DeadLetterActor
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare
from headrace.bus.runtime import dead_letters
from headrace.cli.main import main
from headrace.config import Config, parse
from headrace.ledger import lost_attempts
from headrace.messages.operations import DeadLetter, Rejected
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import EVENT, LEDGER, TASK
from tests.support import records
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S

GROUPS = ("g000001", "g000002", "g000003")


class Place(NamedTuple):
    """A run with letters, and its broker."""

    run: str
    folder: Path
    server: Server

    def headrace(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
        """`headrace dlq RUN ...`."""
        capsys.readouterr()
        code = main(("dlq", str(self.folder), *words))
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err


def request(group: str) -> RolloutRequest:
    return RolloutRequest(run=records.RUN, lane="train", group=group, slot=1, attempt=0, task=records.TASK, seed=1)


async def _fill(config: Config, server: Server) -> None:
    """Work that a rollout actor rejected, stored by a dead-letter actor that started later."""
    connect = Bus.connect
    async with (
        await as_writers(server.url, server.credentials) as admin,
        await connect(server.url, role="rollout", credentials=server.credentials) as rollout,
        await connect(server.url, role="dead_letter", credentials=server.credentials) as dead_letter_bus,
    ):
        await declare(admin)
        for group in GROUPS:
            where = TASK.at(run=records.RUN, lane="train", suite="s")
            seq = await admin.publish(where, request(group), msg_id=f"{records.RUN}.{request(group).trajectory}")
            stored = await admin.get("HR_TASK", seq)
            durable, payload = f"rollout-{records.RUN}-train", bytes(stored.data)
            copy = Rejected(stream="HR_TASK", consumer=durable, stream_seq=seq, subject=where, reason="no such task",
                            deliveries=1, headers=stored.headers, payload=payload)  # fmt: skip
            await rollout.publish(EVENT.at(run=records.RUN, actor="rollout", type=Rejected.type_name), copy)
        for attempt in (0, 1):  # the second group's slot was issued again meanwhile
            issued = records.issued("g000002", 1, attempt)
            await admin.publish(LEDGER.at(run=records.RUN, group="g000002"), issued)
        async with living(DeadLetterActor, config, dead_letter_bus, records.RUN), asyncio.timeout(PATIENCE_S):
            async for _ in admin.follow("HR_DLQ", start=len(GROUPS)):
                break


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run with three letters, whose commands name that folder, and a copy of its original state."""
    folder = tmp_path_factory.mktemp("dlq") / records.RUN
    config = parse(f'[run]\ndir = "{folder.parent}"')
    server = uvloop.run(Server(folder / "broker").start())
    try:
        uvloop.run(_fill(config, server))
    finally:
        uvloop.run(server.stop())
    copy = tmp_path_factory.mktemp("dlq-as-filled") / records.RUN
    shutil.copytree(folder, copy)
    return folder, copy


@pytest.fixture
def place(filled: tuple[Path, Path]) -> Iterator[Place]:
    """The run in its original state, so that no test sees the decisions of another one."""
    folder, copy = filled
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    server = uvloop.run(Server(folder / "broker").start())
    try:
        yield Place(records.RUN, folder, server)
    finally:
        uvloop.run(server.stop())


def letter_of(place: Place, name: str) -> dead_letters.DeadLetterEntry:
    async def body() -> dead_letters.DeadLetterEntry:
        async with await Bus.connect(place.server.url, role="operator", credentials=place.server.credentials) as bus:
            return next(entry for entry in await dead_letters.entries(bus) if name == str(entry.seq))

    return uvloop.run(body())


def in_queue(place: Place, seq: int) -> RolloutRequest:
    async def body() -> RolloutRequest:
        async with await as_writers(place.server.url, place.server.credentials) as bus:
            message = (await bus.get("HR_TASK", seq)).message
            assert isinstance(message, RolloutRequest)
            return message

    return uvloop.run(body())


def test_letters_are_listed_and_shown(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = place.headrace(capsys)
    assert code == 0
    key = f"HR_TASK/rollout-{place.run}-train/3"
    third = next(line for line in out if key in line)
    assert all(word in third for word in ("open", "rollout_request", "no such task"))
    code, out, _ = place.headrace(capsys, "--show", key)
    shown = json.loads("\n".join(out))
    assert code == 0
    assert shown["message"]["group"] == "g000003"
    assert (shown["reason"], shown["stream_seq"], shown["settled"]) == ("no such task", 3, None)
    assert len(shown["trace"]) == 32
    assert shown["command"] == f"headrace dlq {place.folder} --retry {key}"


def test_the_command_of_a_letter_sends_it_again_and_settles_it(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(letter_of(place, "1").letter.command)
    assert main(words[1:]) == 0
    said = capsys.readouterr().out
    again = int(said.split("#")[1].split()[0])
    assert again > len(GROUPS)
    assert in_queue(place, again) == request("g000001")
    settled = letter_of(place, "1").settled
    assert settled is not None
    assert (settled.how, settled.sent) == ("retried", again)
    code, _, err = place.headrace(capsys, "--retry", "1")
    assert code == 1
    assert "was retried already" in err
    assert not any(line.split()[0] == "1" for line in place.headrace(capsys)[1])
    assert any("retried" in line for line in place.headrace(capsys, "--all")[1])


def test_a_retry_that_the_books_will_not_count_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = place.headrace(capsys, "--retry", "2")
    assert code == 0
    assert "its slot has a later attempt" in err


def test_what_cannot_be_done_is_said(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = place.headrace(capsys, "--show", "77")
    assert code == 1
    assert "there is no dead letter '77'; the newest are 1, 2, 3" in err
    entry = letter_of(place, "3")
    book = DeadLetter(stream="HR_SCORE", consumer="x", stream_seq=1, subject="hr.close.r1.g1", type="group_closed",
                      reason="r", deliveries=1, headers={}, payload=b"x")  # fmt: skip

    async def body() -> None:
        async with await Bus.connect(place.server.url, role="operator", credentials=place.server.credentials) as bus:
            with pytest.raises(BusError, match="would falsify the ledger"):
                await dead_letters.resend(bus, entry._replace(letter=book))

    uvloop.run(body())


def test_a_run_that_is_over_keeps_its_letters_and_takes_decisions(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    uvloop.run(place.server.stop())
    try:
        code, _, err = place.headrace(capsys, "--retry", "3")
        assert code == 4
        assert "is over, so no actor would receive the message" in err
        assert any(line.split()[0] == "3" for line in place.headrace(capsys)[1])
        code, out, _ = place.headrace(capsys, "--drop", "3", "--note", "seen")
        assert (code, out) == (0, ["dead letter 3 is dropped"])
        assert not any(line.split()[0] == "3" for line in place.headrace(capsys)[1])
        shown = json.loads("\n".join(place.headrace(capsys, "--show", "3")[1]))
        assert (shown["settled"]["how"], shown["settled"]["note"]) == ("dropped", "seen")
    finally:
        uvloop.run(place.server.start())


@pytest.mark.parametrize("suffix", ["", ".h1", ".r7", ".h2.r7"])
def test_an_attempt_is_known_by_its_id_however_often_it_was_sent(suffix: str) -> None:
    headers = {"Nats-Msg-Id": f"{records.RUN}.u1.g000009-1-2{suffix}"}
    unreadable = DeadLetter(stream="HR_TASK", consumer="c", stream_seq=1, subject="", type="", reason="", deliveries=1,
                            headers=headers, payload=b"\xc1")  # fmt: skip
    assert lost_attempts.lost_attempt(unreadable) == lost_attempts.LostAttempt(records.RUN, "u1.g000009", 1, 2)
