"""Records from before an upgrade are read after it: parts of a run are replaced one by one, and streams are kept.

`wire.json` says which fields a reader of each type could count on when it was last written. It is made anew, beside a
raised version, by: python -m tests.messages.test_versions
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import msgpack

from headrace.messages import TYPES, decode, encode
from headrace.messages.base import OLDER, Message, message, older
from headrace.messages.codec import UnreadableMessage
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT
from tests.conftest import Connect

WIRE = Path(__file__).with_name("wire.json")


def required(cls: type[msgspec.Struct]) -> list[str]:
    """The fields without which it can't be read."""
    return [field.encode_name for field in msgspec.structs.fields(cls) if field.required]


def schema() -> dict[str, Any]:
    return {name: {"version": cls.type_version, "required": required(cls)} for name, cls in sorted(TYPES.items())}


def test_no_reader_asks_for_more_than_its_version_did() -> None:
    """A new field has a default, or the version is raised and the old one is still read."""
    for name, was in json.loads(WIRE.read_text()).items():
        assert name in TYPES, f"{name} is in streams that are kept: it must be read for as long as they are"
        cls = TYPES[name]
        reader = cls if cls.type_version == was["version"] else OLDER.get((name, was["version"]), (cls, None))[0]
        assert cls.type_version >= was["version"]
        assert set(required(reader)) <= set(was["required"]), f"{name}/{was['version']} would not be read any more"


class Before(msgspec.Struct):
    """As it was written: seconds, under another name."""

    who: str
    took: float


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A type whose field was renamed and counts in other units since, with the version raised."""
    monkeypatch.delitem(TYPES, "renamed_in_test", raising=False)

    @message("renamed_in_test", version=2)
    class Renamed(Message, frozen=True, kw_only=True):
        name: str
        wall_ms: float

    older(Renamed, 1, Before, lambda was: Renamed(name=was.who, wall_ms=1000 * was.took))
    yield Renamed
    del TYPES["renamed_in_test"], OLDER["renamed_in_test", 1]


def test_the_previous_version_is_read_as_todays(renamed: Any) -> None:
    old = msgpack.encode(Before(who="a", took=1.5))
    assert decode(old, {"Hr-Type": "renamed_in_test/1"}) == renamed(name="a", wall_ms=1500.0)
    now = renamed(name="a", wall_ms=1500.0)
    payload, headers = encode(now)
    assert headers["Hr-Type"] == "renamed_in_test/2" and decode(payload, headers) == now
    with pytest.raises(UnreadableMessage, match="not a readable renamed_in_test"):
        decode(payload, {"Hr-Type": "renamed_in_test/1"})
    with pytest.raises(UnreadableMessage, match="newer than this reader"):
        decode(payload, {"Hr-Type": "renamed_in_test/3"})
    with pytest.raises(ValueError, match="not older"):
        older(renamed, 2, Before, lambda was: now)


@pytest.mark.anyio
async def test_a_record_of_the_previous_version_is_read_from_its_stream(connect: Connect, renamed: Any) -> None:
    """A record of an actor that is not upgraded yet, next to a current one: the same reader reads both, in order."""
    bus = await connect("admin")
    where = EVENT.at(run="versions", actor="trainer", type="event")
    await bus.publish_raw(where, msgpack.encode(Before(who="old", took=0.25)), {"Hr-Type": "renamed_in_test/1"})
    await bus.publish(where, renamed(name="new", wall_ms=1.0))
    await bus.publish_raw(where, msgpack.encode({"actor": "a", "id": "a", "kind": "k"}), {"Hr-Type": "event/1"})
    read = [received.message async for received in bus.history("HR_EVENT", where)]
    assert read == [
        renamed(name="old", wall_ms=250.0),
        renamed(name="new", wall_ms=1.0),
        Event(actor="a", id="a", kind="k"),
    ]


if __name__ == "__main__":
    WIRE.write_text(json.dumps(schema(), indent=1) + "\n")
    sys.stdout.write(f"{len(TYPES)} types\n")
