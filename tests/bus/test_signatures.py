"""Every type of stored record is refused when its writer did not sign it: generated from the table of subjects, against
a real broker, with the admin's permissions."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus import signatures
from headrace.bus.broker import credentials, keys, permissions
from headrace.bus.broker.keys import Key
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.bus.signatures import FORGED, Forged, Trust
from headrace.messages import subjects as s
from headrace.messages.base import TYPES
from headrace.messages.codec import encode
from headrace.messages.ledger import Fence
from headrace.messages.operations import Ack
from headrace.messages.training import StepFailed
from tests.conftest import Connect
from tests.support import records
from tests.support.keys import STRANGER
from tests.test_docs import script

examples = script("messages").examples

pytestmark = pytest.mark.anyio
FIELDS = {"lane": "train", "suite": "s", "group": "g", "judge": "j", "trajectory": "t", "tenant": "t", "user": "u"}
FIELDS |= {"stream": "hr_task", "consumer": "c", "kind": "k", "version": "1", "shard": "0", "seq": "0"}


def places() -> Iterator[tuple[str, str, str, str]]:
    """Stream, subject, type and a role that writes it there: every signed type on every family, and every bucket."""
    for family in s.SUBJECTS.values():
        stream = s.stream_of(family.where())
        for kind in family.types if stream is not None else ():
            writer = permissions.EVENT_TYPES.get(kind, family.publishers)[0]
            writer = "rollout" if writer == "every actor" else writer
            where = family.at(**FIELDS | {"run": "r", "actor": writer, "type": kind}) if "{" in family.template else ""
            roles = signatures.writers(where, kind)
            if stream is not None and roles:
                yield stream.name, where, kind, writer if writer in roles else min(roles)
    for bucket, role in permissions.KV_WRITERS.items():
        yield f"KV_{bucket}", f"$KV.{bucket}.r.x", "admission", role
    yield "KV_HR_PLUGINS", "$KV.HR_PLUGINS.judge.r.x", "admission", "judge"


PLACES = list(places())


def test_the_table_covers_every_type_that_is_stored() -> None:
    stored = {kind for family in s.SUBJECTS.values() if s.stream_of(family.where()) for kind in family.types}
    unsigned = {*signatures.UNSIGNED, *(kind for kind in stored if kind.startswith("weight_")), "advisory"}
    assert {kind for _, _, kind, _ in PLACES if kind != "admission"} >= stored - unsigned
    assert {"score", "group_closed", "group_dropped", "staleness_bound", "fence", "step_manifest", "step_done"} <= (
        stored - unsigned
    )
    assert {"promotion", "snapshot_ready", "weights_staged", "slot_issued", "slot_failed"} <= stored - unsigned


class Forger:
    """Stores records with the admin's permissions and any signature."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus, self.folder = bus, folder
        self.ids = 0

    def key(self, role: str) -> Key:
        key = keys.load(self.folder, role)
        assert key is not None
        return key

    def stranger(self, roles: frozenset[str]) -> Key:
        """The key of a role that does not write there."""
        return self.key(next(role for role in permissions.ROLES if role not in roles))

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        self.ids += 1
        return {**headers, "Nats-Msg-Id": f"{time.time_ns()}.{self.ids}"}

    async def store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        reply = await self.bus.connection.call(subject, payload, headers=headers)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        assert "error" not in answer, answer
        return int(answer["seq"])


def flipped(data: bytes) -> bytes:
    """The bytes with one bit changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(("stream", "subject", "kind", "writer"), PLACES, ids=lambda value: str(value))
async def test_a_record_that_its_writer_did_not_sign_is_refused(
    server: Server, connect: Connect, stream: str, subject: str, kind: str, writer: str
) -> None:
    bus = await Bus.connect(server.url, role="admin", credentials=server.credentials)
    forger = Forger(bus, server.credentials)
    payload, headers = encode(examples(TYPES[kind])[0])
    roles = signatures.writers(subject, kind)
    assert roles is not None and writer in roles
    elsewhere = subject.replace(".r.", ".r2.", 1) if ".r." in subject else f"{subject}2"
    signer = forger.key(writer)
    try:
        good = await forger.store(
            subject, payload, signatures.signed(signer, subject, forger.headers(headers), payload)
        )
        forged = [
            await forger.store(subject, payload, forger.headers(headers)),
            await forger.store(
                subject, payload, signatures.signed(forger.stranger(roles), subject, forger.headers(headers), payload)
            ),
            await forger.store(
                subject, payload, signatures.signed(STRANGER, subject, forger.headers(headers), payload)
            ),
            await forger.store(
                subject, payload, signatures.signed(signer, elsewhere, forger.headers(headers), payload)
            ),
            await forger.store(
                subject, flipped(payload), signatures.signed(signer, subject, forger.headers(headers), payload)
            ),
            await forger.store(
                subject, payload, signatures.signed(signer, subject, forger.headers(headers), payload)
                | {"Hr-Type": f"{kind}/2"},
            ),
        ]  # fmt: skip
        checked = {seq: bus.signed(await bus.get(stream, seq)) for seq in (good, *forged)}
    finally:
        await bus.close()
    assert checked == {good: True} | dict.fromkeys(forged, False)
    assert {record.reason[: len(FORGED)] for record in bus.skipped.values()} == {FORGED}
    assert len(bus.skipped) == len(forged)


async def test_a_record_that_is_stored_again_is_refused(server: Server, connect: Connect) -> None:
    """The broker knows its id for twice as long as its signature is valid."""
    bus = await connect("trainer")
    record = StepFailed(run="again", step=0, version=0, state_hash="", manifest_seq=0, groups=(), dropped_slots=0,
                        reason="engine_error")  # fmt: skip
    where = s.STEP.at(run="again")
    seq = await bus.publish(where, record)
    forger = Forger(await Bus.connect(server.url, role="admin", credentials=server.credentials), server.credentials)
    stored = (await bus.get("HR_STEP", seq)).headers
    payload, _ = encode(record)
    assert await forger.store(where, payload, stored) == seq  # a duplicate
    without = {name: value for name, value in stored.items() if name != "Nats-Msg-Id"}
    await forger.store(where, payload, without)
    await forger.store(where, payload, {**stored, "Nats-Msg-Id": "another"})
    assert [received.seq async for received in bus.history("HR_STEP", where)] == [seq]
    assert bus.skipped_count == 2
    await forger.bus.close()


async def test_a_signature_of_another_time_is_refused() -> None:
    key, trust = STRANGER, Trust(None)
    trust._keys = signatures.parse(f"trainer {key.public}\n")
    where, payload = s.STEP.at(run="r"), b"x"
    headers = signatures.signed(key, where, {"Hr-Type": "fence/1"}, payload)
    now = time.time()
    trust.check(where, "fence", headers, payload, now)
    trust.check(where, "fence", headers, payload, now + signatures.FRESH_S - 5)
    for stored in (now + signatures.FRESH_S + 5, now - signatures.FRESH_S - 5):
        with pytest.raises(Forged, match="clocks"):
            trust.check(where, "fence", headers, payload, stored)
    windows = [stream.duplicate_window_s for stream in s.STREAMS]
    assert min(windows) >= 2 * signatures.FRESH_S


async def test_a_signature_names_the_digest_that_it_covers() -> None:
    trust, where, payload = Trust(None), s.STEP.at(run="r"), b"x"
    trust._keys = signatures.parse(f"trainer {STRANGER.public}\n")
    headers = signatures.signed(STRANGER, where, {"Hr-Type": "fence/1"}, payload)
    trust.check(where, "fence", headers, payload, time.time())
    for digest in ("", " sha1"):
        other = {
            **headers,
            signatures.HEADER: headers[signatures.HEADER].removesuffix(f" {signatures.DIGEST}") + digest,
        }
        with pytest.raises(Forged):
            trust.check(where, "fence", other, payload, time.time())


async def test_a_forged_entry_or_deletion_of_a_bucket_changes_nothing(server: Server, connect: Connect) -> None:
    trainer, reader = await connect("trainer"), await connect("rollout")
    values, key = await trainer.kv("HR_RENDERER"), "trainer.forged.x"
    first = await values.put(key, Ack(detail="mine"))
    forger = Forger(await Bus.connect(server.url, role="admin", credentials=server.credentials), server.credentials)
    where, (payload, headers) = f"$KV.HR_RENDERER.{key}", encode(Ack(detail="forged"))
    await forger.store(where, payload, forger.headers(headers))
    await forger.store(where, b"", forger.headers({"KV-Operation": "DEL"}))
    signed = signatures.signed(forger.key("curriculum"), where, forger.headers({"KV-Operation": "DEL"}), b"")
    last = await forger.store(where, b"", signed)
    seen = await reader.kv("HR_RENDERER")
    assert await seen.get(key) == (Ack(detail="mine"), first)
    assert await seen.items(key) == {key: (Ack(detail="mine"), first)}
    assert await values.update(key, Ack(detail="again"), first) > last  # the fence holds over forged entries
    with pytest.raises(WrongSequence):
        await values.update(key, Ack(detail="zombie"), first)
    assert await forger.store(where, b"", signed) == last  # the broker calls it a repetition
    await values.delete(key)
    assert await seen.get(key) is None
    await forger.bus.close()


async def test_a_forged_record_does_not_fence_its_writer_out(server: Server, connect: Connect) -> None:
    """A record of another role on the run's subject ended the trainer: its writes name the last record of the run."""
    trainer, where = await connect("trainer"), s.STEP.at(run="fenced")
    seq = await trainer.publish(where, Fence(run="fenced", actor="trainer", id="a"), expect=0)
    forger = Forger(await Bus.connect(server.url, role="admin", credentials=server.credentials), server.credentials)
    payload, headers = encode(Fence(run="fenced", actor="trainer", id="b"))
    forged = await forger.store(where, payload, forger.headers(headers))
    following = await trainer.publish(where, Fence(run="fenced", actor="trainer", id="c"), expect=seq)
    assert following > forged
    with pytest.raises(WrongSequence):
        await trainer.publish(where, Fence(run="fenced", actor="trainer", id="d"), expect=seq)
    assert [received.seq async for received in trainer.history("HR_STEP", where)] == [seq, following]
    await forger.bus.close()


async def test_a_claim_check_is_signed_and_its_content_is_that_of_its_name(server: Server, connect: Connect) -> None:
    judge, trainer = await connect("judge"), await connect("trainer")
    where = s.SCORE.at(run=records.RUN, judge="j1", group="g000001")
    large = msgspec.structs.replace(records.score("g000001"), reason="".join(map(str, range(400_000))))
    real = await judge.publish(where, large)
    forger = Forger(await Bus.connect(server.url, role="admin", credentials=server.credentials), server.credentials)
    ref = await forger.bus.put_blob(large)
    body, kind = encode(ref)
    forged = await forger.store(
        where, body, signatures.signed(forger.key("rollout"), where, forger.headers(kind), body)
    )
    checked = [received async for received in trainer.history("HR_SCORE", where)]
    assert [received.seq for received in checked] == [real] and checked[0].message == large
    assert list(trainer.skipped) == [("HR_SCORE", forged)]
    await forger.bus.close()


async def test_without_credentials_nothing_is_signed_and_nothing_is_trusted() -> None:
    with pytest.raises(Forged, match=r"which writers\.pub"):
        headers = signatures.signed(STRANGER, "hr.step.r", {"Hr-Type": "fence/1"}, b"")
        Trust.of(None).check("hr.step.r", "fence", headers, b"", time.time())


async def test_a_new_seed_is_accepted_beside_the_old_one(server: Server, connect: Connect, tmp_path: Path) -> None:
    """Records of both hold; a file that changes is read again without a restart."""
    folder = credentials.write(tmp_path / "keys")
    trust, where = Trust.of(folder), s.STEP.at(run="r")
    old, other = keys.load(folder, "trainer"), keys.load(folder, "judge")
    assert old is not None and other is not None
    trust.check(where, "fence", signatures.signed(old, where, {}, b""), b"", time.time())
    (folder / "trainer.nk").unlink()
    credentials.write(folder)
    new = keys.load(folder, "trainer")
    assert new is not None and new.public != old.public
    for key in (new, old):
        trust.check(where, "fence", signatures.signed(key, where, {}, b""), b"", time.time())
    with pytest.raises(Forged, match="signed by judge"):
        trust.check(where, "fence", signatures.signed(other, where, {}, b""), b"", time.time())


async def test_a_region_signs_for_its_own_roles_alone(tmp_path: Path) -> None:
    hub, region = credentials.write(tmp_path / "hub"), credentials.write(tmp_path / "eu", writers=permissions.REGIONAL)
    all_of_it = credentials.write(tmp_path / "all")  # a region that claims every role
    credentials.trust(hub, all_of_it / credentials.WRITERS, permissions.REGIONAL)
    credentials.trust(region, hub / credentials.WRITERS)
    score, step = s.SCORE.at(run="r", judge="j", group="g"), s.STEP.at(run="r")
    judge, trainer = keys.load(all_of_it, "judge"), keys.load(all_of_it, "trainer")
    assert judge is not None and trainer is not None
    Trust.of(hub).check(score, "score", signatures.signed(judge, score, {}, b""), b"", time.time())
    Trust.of(region).check(score, "score", signatures.signed(judge, score, {}, b""), b"", time.time())
    with pytest.raises(Forged):
        Trust.of(hub).check(step, "fence", signatures.signed(trainer, step, {}, b""), b"", time.time())
