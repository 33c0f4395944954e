"""API keys and secrets at a real broker: hashes and sealed boxes alone, and no change that another one undoes."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from headrace.bus.broker import credentials
from headrace.bus.broker.keys import Key
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare
from headrace.bus.sealing import sealed, unsealed
from headrace.gateway.tenants.keys import ApiKeys, digest_of
from headrace.gateway.tenants.store import KeysRefused, add, entries, make_secrets, revoke, secret
from headrace.messages.product import PURGE_SECRET, USERS_SECRET, SealedSecret
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


async def test_the_broker_holds_neither_a_key_nor_a_secret(connect: Connect, server: Server) -> None:
    operator = await connect("operator")
    key = await add(operator, "acme")
    users = await secret(operator, USERS_SECRET)
    assert users == await secret(await connect("gateway"), USERS_SECRET) and len(users) == 32
    stored = b"".join([bytes(record.data) async for record in (await connect("admin")).records("KV_HR_KEYS", "$KV.>")])
    for text in (key, key.removeprefix("hr-")):
        assert text.encode() not in stored
    assert users not in stored and users.hex().encode() not in stored
    assert digest_of(key).encode() in stored
    with pytest.raises(KeysRefused, match="not sealed for the seed"):
        await secret(await connect("gateway"), PURGE_SECRET)
    with pytest.raises(KeysRefused, match="not sealed for the seed"):
        await secret(await connect("feedback"), USERS_SECRET)


async def test_only_the_operator_writes_keys(connect: Connect) -> None:
    await make_secrets(await connect("operator"))
    for role in ("gateway", "feedback"):
        with pytest.raises(BusError):
            await add(await connect(role), "acme")


async def test_keys_that_are_made_and_ended_at_once_are_all_kept_and_all_ended(connect: Connect) -> None:
    """Of 24 that were made at once 4 to 8 survived, and an ended one could come back."""
    operators = [await connect("operator") for _ in range(3)]
    ended = digest_of(await add(operators[0], "ended"))[:8]
    made = await asyncio.gather(
        *(add(operators[number % 3], f"t{number}") for number in range(24)), revoke(operators[1], ended)
    )
    ids = {entry.id for entry in await entries(operators[2])}
    assert {digest_of(key)[:8] for key in made if key} <= ids and ended not in ids
    assert len(set(made) - {None}) == 24


async def test_two_operators_make_one_secret(server: Server, tmp_path: Path) -> None:
    async with Server(tmp_path) as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
            await declare(admin)
        buses = [await Bus.connect(broker.url, role="operator", credentials=broker.credentials) for _ in range(6)]
        await asyncio.gather(*(make_secrets(bus) for bus in buses))
        assert len({await secret(bus, USERS_SECRET) for bus in buses}) == 1
        before = await secret(buses[0], USERS_SECRET)

        # A gateway's seed is changed: the next `headrace keys` seals the secret for the new one too.
        folder = tmp_path / "other"
        shutil.copytree(broker.credentials, folder)
        (folder / "gateway.nk").unlink()
        credentials.write(folder)
        found = await (await buses[0].kv("HR_KEYS")).get(USERS_SECRET)
        assert found is not None and isinstance(found[0], SealedSecret)
        new = Key.parse((folder / "gateway.nk").read_text())
        assert new.public not in found[0].boxes
        async with await Bus.connect(broker.url, role="operator", credentials=folder) as operator:
            await make_secrets(operator)
            found = await (await operator.kv("HR_KEYS")).get(USERS_SECRET)
        assert found is not None and isinstance(found[0], SealedSecret)
        assert new.opened(found[0].boxes[new.public]) == before

        # A secret that cannot be read is never replaced: a new one would give every user another hash.
        await buses[0].publish_raw(f"$KV.HR_KEYS.{USERS_SECRET}", b"{]", {"Hr-Type": "sealed_secret/1"})
        last = await buses[0].last_seq("KV_HR_KEYS")
        with pytest.raises(KeysRefused, match="it is not replaced"):
            await make_secrets(buses[1])
        assert await buses[0].last_seq("KV_HR_KEYS") == last
        for bus in buses:
            await bus.close()


async def test_a_damaged_box_opens_nothing(connect: Connect) -> None:
    operator = await connect("operator")
    box = sealed(operator, os.urandom(32), ("gateway",))
    gateway = await connect("gateway")
    assert unsealed(gateway, box) is not None and unsealed(operator, box) is None
    for damaged in (b"", b"x", *(data[:-1] + bytes([data[-1] ^ 1]) for data in box.boxes.values())):
        assert unsealed(gateway, SealedSecret(boxes=dict.fromkeys(box.boxes, damaged))) is None


@pytest.mark.parametrize("tenant", ["", " ", "\t", "a\nb", "a\0", "\u202e", "\ud800", " acme", "acme ", "x" * 129])
async def test_a_tenant_without_a_name_gets_no_key(connect: Connect, tenant: str) -> None:
    with pytest.raises(KeysRefused, match="expected a tenant's name"):
        await add(await connect("operator"), tenant)


@pytest.mark.parametrize("id", ["", "*", ">", "12345678", "1234567", "secret.users", "../12345", "1234567G"])
async def test_an_id_without_a_key_is_refused(connect: Connect, id: str) -> None:
    operator = await connect("operator")
    await add(operator, "acme")
    with pytest.raises(KeysRefused):
        await revoke(operator, id)


@pytest.mark.parametrize("record", [b"", b"{]", b"\xff\xfe", b'{"id": 1}', b"\x00" * 100])
async def test_a_damaged_record_is_named_and_can_be_ended(connect: Connect, record: bytes) -> None:
    operator = await connect("operator")
    key = await add(operator, "acme")
    id = digest_of(key)[:8]
    await operator.publish_raw(f"$KV.HR_KEYS.key.{id}", record, {"Hr-Type": "api_key/1"})
    with pytest.raises(KeysRefused, match=f"the record of key {id} cannot be read.*--revoke {id}"):
        await entries(operator)
    await revoke(operator, id)
    assert id not in {entry.id for entry in await entries(await connect("operator"))}


def test_a_key_of_another_name_is_not_taken_up() -> None:
    keys = ApiKeys()
    keys.apply("key.12345678", None)
    assert keys.find("hr-x") is None
