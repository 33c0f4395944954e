"""One sample of every message type, made from its struct, and mutations of it, as a faulty or hostile writer could
publish them."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import lz4.frame
from msgspec import inspect, msgpack

from headrace.bus.broker.permissions import EVENT_TYPES
from headrace.bus.connection import Bus
from headrace.messages import TYPES
from headrace.messages import subjects as s
from headrace.messages.base import Message

GROUP = "g000001"


class Record(NamedTuple):
    """One publication: subject, bytes, headers, and the change that was made to a good record."""

    subject: str
    payload: bytes
    headers: dict[str, str]
    what: str


def sample(cls: type[Message], run: str) -> dict[str, Any]:
    """The fields of a readable message of a type; its run is `run`, its group `GROUP`."""
    fields: dict[str, Any] = _value(inspect.type_info(cls))
    ours = {"run": run, "group": GROUP, "trajectory": f"{GROUP}-0-0", "lane": "train", "user": "ab12", "judge": "j"}
    return fields | {name: value for name, value in ours.items() if name in fields}


def _value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            if cls.__name__ == "Array":
                return {"dtype": "<i4", "shape": [1], "data": b"\x01\0\0\0"}
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return {field.encode_name: _value(field.type) for field in fields} | tag
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return _value(types[0])
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_value(item)]
        case inspect.TupleType(item_types=items):
            return [_value(item) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key): _value(value)}
        case inspect.StrType(pattern=pattern):
            return "0" * 64 if pattern and "0-9a-f]{32" in pattern else "x1"
        case inspect.BytesType():
            return b"\0"
        case inspect.BoolType():
            return False
        case inspect.IntType() | inspect.FloatType():
            return 1
    raise TypeError(f"no sample for {kind}")


def places(name: str, run: str) -> list[str]:
    """The stream subjects on which a type is published."""
    tokens: dict[str, str | int] = {
        **{"run": run, "group": GROUP, "trajectory": f"{GROUP}-0-0", "lane": "train", "suite": "generated-train"},
        **{
            "actor": EVENT_TYPES.get(name, ("rollout",))[0],
            "type": name,
            "judge": "j",
            "stream": "hr_task",
            "consumer": "c",
            "version": 1,
        },
        **{"shard": 0, "seq": 0, "tenant": "default", "user": "ab12"},
    }
    families = [subject for subject in s.SUBJECTS.values() if name in subject.types and subject is not s.ADVISORY]
    return [subject.at(**tokens) for subject in families if s.stream_of(subject.where()) is not None]


def readable(run: str) -> Iterator[tuple[type[Message], Record]]:
    """A readable record of every type that has a stream."""
    for name, cls in sorted(TYPES.items()):
        for place in places(name, run):
            yield cls, Record(place, msgpack.encode(sample(cls, run)), _headers(cls), "as it should be")


def mutations(run: str, seed: int = 1, per_field: int = 1) -> Iterator[Record]:
    """Mutated records of every type, on its own subjects; some are still readable (an unknown field, an odd value)."""
    generator = random.Random(seed)
    for cls, record in readable(run):
        fields = sample(cls, run)
        yield record._replace(payload=b"", what="empty")
        yield record._replace(payload=generator.randbytes(200), what="garbage")
        yield record._replace(payload=record.payload[: len(record.payload) // 2], what="half written")
        yield record._replace(payload=bytes(1 << 16), what="zeros")
        yield record._replace(payload=b"\x91" * 100_000, what="deep nesting")
        yield record._replace(payload=b"\x80", what="no fields")
        yield record._replace(headers={}, what="no headers")
        yield record._replace(headers={"Hr-Type": "no_such_type/1"}, what="unknown type")
        for version in ("9", "0", "-1", "²", "9" * 5000, ""):
            yield record._replace(headers={"Hr-Type": f"{cls.type_name}/{version}"}, what=f"version {version[:9]}")
        lz4_headers = record.headers | {"Hr-Encoding": "lz4"}
        yield record._replace(headers=lz4_headers, what="not lz4 though it says so")
        yield record._replace(headers=record.headers | {"Hr-Encoding": "zip"}, what="unknown encoding")
        bomb = lz4.frame.compress(bytes(1 << 20), store_size=True)
        yield record._replace(payload=bomb, headers=lz4_headers, what="lz4 of zeros")
        yield record._replace(payload=msgpack.encode(fields | {"unknown_field": [1, {"a": None}]}), what="extra field")
        reference = {"sha256": "0" * 64, "bytes": 1 << 20, "chunks": 1, "type": record.headers["Hr-Type"]}
        for change in ({}, {"sha256": "../x y"}, {"bytes": 1 << 60, "chunks": 1 << 50}, {"chunks": 0}):
            claim = msgpack.encode(reference | change)
            yield record._replace(payload=claim, headers={"Hr-Type": "blob_ref/1"}, what=f"claim check {change}")
        for name in fields:
            if name in ("run", "lane", "group", "trajectory"):
                for other in ("another", "", "x y/z", "\ud7ff", "a" * 300):
                    yield record._replace(
                        payload=msgpack.encode(fields | {name: other}), what=f"{name} is {other[:9]!r}"
                    )
            without = {key: value for key, value in fields.items() if key != name}
            yield record._replace(payload=msgpack.encode(without), what=f"without {name}")
            odd: list[Any] = [None, -1, 2**63, "text", "", b"\xff", math.nan, math.inf, [], {}, [[]], {"": None}, True]
            for value in generator.sample(odd, per_field):
                yield record._replace(payload=msgpack.encode(fields | {name: value}), what=f"{name} is {value!r}")


def _headers(cls: type[Message]) -> dict[str, str]:
    return {"Hr-Type": f"{cls.type_name}/{cls.type_version}"}


async def pollute(admin: Bus, run: str) -> int:
    """Publish mutated records of every type and remove those that can be read; how many are left."""
    streams = [stream for stream in s.STREAMS if stream.name not in ("HR_BLOB", "HR_ADVISORY", "HR_TASK")]
    clean = {stream.name: await admin.last_seq(stream.name) for stream in streams}
    places: dict[str, str] = {}
    for record in itertools.islice(mutations(run, seed=5), 0, None, 5):
        await admin.connection.send(record.subject, record.payload, record.headers)
        stream = s.stream_of(record.subject)
        places[stream.name if stream is not None else ""] = record.subject
    for place in places.values():  # acknowledged: everything before it is stored
        await admin.publish_raw(place, b"", {"Hr-Type": "no_such_type/1"})
    for stream in streams:
        later = clean[stream.name] + 1
        for seq in [read.seq async for read in admin.history(stream.name, *stream.subjects, start=later)]:
            await admin.delete(stream.name, seq)
    return sum([await admin.last_seq(name) - last for name, last in clean.items()])
