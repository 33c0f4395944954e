"""Golden bytes: recorded encodings of every message type, which today's code must read as the same values.

An upgrade replaces the actors of a run one by one, and streams are kept. So a reader meets messages of the version
before it, and a reader of that version meets today's. `tests/messages/golden.json` holds the encodings of deterministic
examples of each ``type/version``, oldest first; `docs/messages.py --golden` adds what is new and refuses what is
incompatible. docs/wire.md has the rule.
"""

import builtins
import re
import zlib
from typing import Any, TypeAlias

import msgspec.inspect as shapes
from msgspec import convert, json, msgpack

from headrace.messages.base import OLDER, TYPES, Array, Message
from headrace.messages.codec import TYPE_HEADER, UnreadableMessage, decode

Recordings: TypeAlias = dict[str, list[list[str]]]
"""``type/version`` to its recordings, oldest first; a recording is the hexadecimal msgpack of each example."""

_TEXTS = ("{}", "g.{}", "{}" * 8)
"""Forms of a text, tried in this order until one fits the field's pattern; `{}` is 8 hexadecimal digits."""
_LARGEST = 2**31 - 1
"""Integers without an upper limit are at most this."""


def examples(cls: type[Message]) -> list[Message]:
    """Messages of a type that together take every alternative of every union and literal; the last one has nil where
    it may. Every field is set, to a value that its path determines."""
    shape = shapes.type_info(cls)
    values = [_value(shape, index, cls.type_name) for index in range(_count(shape))]
    return [convert(value, cls) for value in [*values, _value(shape, -1, cls.type_name)]]


def _count(shape: shapes.Type) -> int:
    """How many examples it takes to show every alternative of a type once."""
    if isinstance(shape, shapes.StructType) and shape.cls is not Array:
        return max([1, *(_count(field.type) for field in shape.fields)])
    if isinstance(shape, shapes.UnionType):
        return sum(_count(arm) for arm in shape.types if not isinstance(arm, shapes.NoneType))
    if isinstance(shape, shapes.LiteralType):
        return len(shape.values)
    if isinstance(shape, shapes.BoolType):
        return 2
    return max([1, *(_count(item) for item in _items(shape))])


def _items(shape: shapes.Type) -> tuple[shapes.Type, ...]:
    """The types of what a container holds."""
    if isinstance(shape, shapes.VarTupleType | shapes.ListType):
        return (shape.item_type,)
    if isinstance(shape, shapes.TupleType):
        return shape.item_types
    return (shape.key_type, shape.value_type) if isinstance(shape, shapes.DictType) else ()


def _value(shape: shapes.Type, index: int, path: str) -> Any:
    """The value of example `index` at a path, as msgspec converts it; index -1 is the example with nil."""
    seed = zlib.crc32(path.encode())
    match shape:
        case shapes.StructType(cls=cls) if cls is Array:
            return Array.of([seed % 100, seed % 99, seed % 98, seed % 97], "<i4", (2, 2))
        case shapes.StructType():
            made = {each.encode_name: _value(each.type, index, f"{path}.{each.name}") for each in shape.fields}
            if shape.array_like:
                return ([shape.tag] if shape.tag is not None else []) + list(made.values())
            return made | ({shape.tag_field: shape.tag} if shape.tag_field is not None else {})
        case shapes.UnionType():
            return _arm(shape, index, path)
        case shapes.LiteralType():
            return shape.values[index % len(shape.values)]
        case shapes.BoolType():
            return index % 2 == 0
        case shapes.NoneType():
            return None
        case shapes.IntType(ge=low, le=high):
            smallest, largest = int(low or 0), int(high if high is not None else _LARGEST)
            return largest if index < 0 else smallest + (seed + index) % min(10_000, largest - smallest + 1)
        case shapes.FloatType(ge=low, le=high):
            least, most = float(low or 0), float(high if high is not None else _LARGEST)
            return most if index < 0 else least + (most - least) * ((seed + index) % 1024) / 1024
        case shapes.StrType():
            return _text(shape, seed)
        case shapes.BytesType():
            return seed.to_bytes(4, "little")
        case shapes.VarTupleType() | shapes.ListType() | shapes.TupleType():
            return [_value(item, index, f"{path}[{at}]") for at, item in enumerate(_items(shape))]
        case shapes.DictType():
            return {_value(shape.key_type, index, f"{path}.key"): _value(shape.value_type, index, f"{path}.value")}
        case shapes.CustomType(cls=builtins.object):
            return {"type": "object"}
        case _:
            raise TypeError(f"{path}: messages/golden.py makes no example of a {type(shape).__name__}")


def _arm(shape: shapes.UnionType, index: int, path: str) -> Any:
    """The value of the arm that an example takes: each arm has as many consecutive examples as it has alternatives."""
    arms = [arm for arm in shape.types if not isinstance(arm, shapes.NoneType)]
    if index < 0:
        return _value(arms[-1], index, path) if len(arms) == len(shape.types) else None
    index %= sum(_count(arm) for arm in arms)
    for arm in arms:
        if index < _count(arm):
            break
        index -= _count(arm)
    return _value(arm, index, path)


def _text(shape: shapes.StrType, seed: int) -> str:
    """A text that fits the pattern."""
    for form in _TEXTS:
        text = form.replace("{}", f"{seed:08x}")
        if re.search(shape.pattern or "", text):
            return text
    raise TypeError(f"messages/golden.py has no form of a text for the pattern {shape.pattern}; add one to _TEXTS")


def read(text: str) -> Recordings:
    """The recordings of a file. ValueError: it is not one."""
    recordings = json.decode(text, type=Recordings)
    for recorded in recordings.values():
        for encoded in recorded:
            for example in encoded:
                bytes.fromhex(example)
    return recordings


def today() -> dict[str, list[str]]:
    """Every type with its version, and the examples as today's code encodes them."""
    return {
        f"{name}/{cls.type_version}": [msgpack.encode(message).hex() for message in examples(cls)]
        for name, cls in sorted(TYPES.items())
    }


def incompatible(recordings: Recordings) -> list[str]:
    """The recorded types that today's code reads differently: one sentence for each."""
    problems = []
    for kind, recorded in recordings.items():
        for text in (text for examples in recorded for text in examples):
            problem = _difference(kind, bytes.fromhex(text))
            if problem:
                problems.append(
                    f"{kind}: {problem}; give the field back, or raise the type's version and register the struct "
                    "before it with headrace.messages.base.older"
                )
                break
    return problems


def unrecorded(recordings: Recordings) -> list[str]:
    """The types that have no recording, or encode other bytes than their latest one."""
    return [kind for kind, encoded in today().items() if not recordings.get(kind) or recordings[kind][-1] != encoded]


def _difference(kind: str, payload: bytes) -> str:
    """The difference between a recorded message and the same one read and encoded again; empty without one."""
    try:
        message = decode(payload, {TYPE_HEADER: kind})
    except UnreadableMessage as error:
        return str(error)
    name, _, version = kind.partition("/")
    if (name, int(version)) in OLDER:
        return ""  # the upgrade decides which fields go on; its own test compares them
    return _lost(msgpack.decode(payload), msgpack.decode(msgpack.encode(message)), "")


def _lost(was: object, now: object, path: str) -> str:
    """The first place at which `now` lacks what `was` has. More fields, or items at the end of an array, are lawful."""
    if type(was) is not type(now):
        return f"{path or 'it'} was {was!r} and is {now!r}"
    if isinstance(was, dict) and isinstance(now, dict):
        for key, value in was.items():
            if key not in now:
                return f"{path}.{key} is gone"
            if problem := _lost(value, now[key], f"{path}.{key}"):
                return problem
    elif isinstance(was, list) and isinstance(now, list):
        if len(now) < len(was):
            return f"{path} had {len(was)} items and has {len(now)}"
        for at, value in enumerate(was):
            if problem := _lost(value, now[at], f"{path}[{at}]"):
                return problem
    elif was != now:
        return f"{path} was {was!r} and is {now!r}"
    return ""
