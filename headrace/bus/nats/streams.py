"""Declare every stream and bucket of `messages.subjects`; a declaration that exists is brought up to date.

`max_bytes` of a stream is reserved on the broker's disk at creation, 30 GiB for all of ours. An embedded broker on a
laptop therefore reserves nothing (the age limits and the trainer's purges bound it); production passes `reserve=True`
and is refused with one sentence when the disk is too small for the streams.

Sizes and replicas of a stream that exists are the operator's: a declaration changes its limit only to one that the
configuration names, or, with `reserve`, from a smaller one or none to the planned size, and never lowers its replicas.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.bus.broker.permissions import known
from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError, StreamMissing
from headrace.bus.nats.connection import NatsConnection
from headrace.messages.subjects import DUPLICATES_S, KEY_VALUES, STREAMS, Stream

_NOT_FOUND, _NO_STORAGE, _NO_MEMORY = 10059, 10047, 10028
JETSTREAM_OFF = 10076
_SECOND = 1_000_000_000
PRESENCE_S = 15.0
"""An entry of HR_PRESENCE lapses after this time without a heartbeat."""
KV_HISTORY = 8


def config_of(stream: Stream, *, reserve: bool, replicas: int) -> dict[str, Any]:
    """The broker's configuration of a stream."""
    return {
        "name": stream.name,
        "description": stream.note,
        "subjects": list(stream.subjects),
        "retention": stream.retention,
        "discard": stream.discard,
        "storage": "file",
        "num_replicas": replicas,
        "max_age": int(stream.max_age_s * _SECOND),
        "max_bytes": stream.max_bytes if reserve else -1,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "duplicate_window": int(stream.duplicate_window_s * _SECOND),
        "allow_direct": True,
        "allow_rollup_hdrs": False,
        "deny_delete": False,
        "deny_purge": False,
        "compression": "none",
        "allow_msg_ttl": stream.expiring,
        "max_msgs_per_subject": 1 if stream.once else -1,
        "discard_new_per_subject": stream.once,
    }


def bucket_config(name: str, note: str, *, replicas: int) -> dict[str, Any]:
    """The broker's configuration of a key-value bucket (the layout of every NATS client)."""
    presence = name == "HR_PRESENCE"
    return {
        "name": f"KV_{name}",
        "description": note,
        "subjects": [f"$KV.{name}.>"],
        "retention": "limits",
        "discard": "new",
        "storage": "file",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1 if presence else KV_HISTORY,
        "max_bytes": -1,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_age": int(PRESENCE_S * _SECOND) if presence else 0,
        "duplicate_window": int((PRESENCE_S if presence else DUPLICATES_S) * _SECOND),
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "deny_delete": True,
        "deny_purge": False,
        "allow_direct": True,
    }


_ON = ("allow_direct", "allow_msg_ttl", "discard_new_per_subject")
_OFF = (
    "allow_msg_ttl",
    "allow_rollup_hdrs",
    "allow_atomic",
    "allow_batched",
    "allow_msg_counter",
    "allow_msg_schedules",
)
"""Switches that let a header of one writer reach the records of another."""


async def require(connection: NatsConnection) -> None:
    """StreamMissing, with the command that helps, unless the broker has every stream and bucket that the connection's
    role may ask about as actors need them."""
    names = known(connection.role)
    absent: list[str] = []
    outdated: list[str] = []
    wanted = [config_of(stream, reserve=False, replicas=1) for stream in STREAMS]
    wanted += [bucket_config(name, note, replicas=1) for name, note in KEY_VALUES.items()]
    for config in wanted:
        name = config["name"]
        if name not in names:
            continue
        try:
            reply = await connection.patiently(lambda name=name: connection.api(f"STREAM.INFO.{name}"))  # type: ignore[misc]
            outdated += [f"{name}: {lack}" for lack in _lacks(config, msgspec.json.decode(reply)["config"])]
        except ApiError as error:
            if error.err_code not in (_NOT_FOUND, JETSTREAM_OFF):
                raise BusError(f"stream {name} cannot be looked up: {error}") from error
            absent.append(name)
    if absent:
        raise StreamMissing(
            f"the broker at {connection.url} lacks {len(absent)} of {len(names)} streams ({', '.join(absent[:3])}"
            f"{' ...' if len(absent) > 3 else ''}); declare them once with: "
            f"headrace bus declare --url {connection.url} --credentials FOLDER"
        )
    if outdated:
        raise StreamMissing(
            f"the streams of the broker at {connection.url} were declared by an earlier headrace ({outdated[0]}"
            f"{f', and {len(outdated) - 1} more' if len(outdated) > 1 else ''}); update them, without loss, with: "
            f"headrace bus declare --url {connection.url} --credentials FOLDER"
        )


def _lacks(wanted: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The properties that a stream lacks, one phrase each. Sizes, ages and replicas are the operator's; what a later
    headrace has added does no harm."""
    if "mirror" in now:
        return []
    lacks = [f"it does not take {subject}" for subject in wanted["subjects"] if subject not in now.get("subjects", [])]
    for key in ("retention", "discard", "max_msgs_per_subject"):
        if now.get(key) != wanted[key]:
            lacks.append(f"{key} is {now.get(key)}, expected {wanted[key]}")
    if now.get("duplicate_window", 0) < wanted["duplicate_window"]:
        lacks.append("it forgets message ids too soon")
    lacks += [f"{key} is off" for key in _ON if wanted.get(key) and not now.get(key)]
    lacks += [f"{key} is on" for key in _OFF if now.get(key) and not wanted.get(key)]
    return lacks


async def declare(
    bus: Bus, *, reserve: bool = False, replicas: int = 1, sizes: Mapping[str, int] | None = None
) -> None:
    """Make or update all streams and buckets; needs the admin role.

    sizes: limits of some streams in bytes, by name, instead of the planned ones. BusError when the disk is too small,
    and when a stream holds more than its new limit.
    """
    sizes = sizes or {}
    for stream in STREAMS:
        config = config_of(stream, reserve=reserve, replicas=replicas)
        await _put(bus.connection, config, sizes.get(stream.name, 0))
    for name, note in KEY_VALUES.items():
        await _put(bus.connection, bucket_config(name, note, replicas=replicas))


class StreamSize(NamedTuple):
    """Of one stream, in bytes."""

    stored: int
    limit: int
    """The largest number of bytes that it may have; 0 for no limit."""


async def size_of(connection: NatsConnection, name: str) -> StreamSize:
    """How large a stream is and may become. BusError when the broker does not answer or has no such stream."""
    info = msgspec.json.decode(await connection.api(f"STREAM.INFO.{name}"))
    return StreamSize(info["state"]["bytes"], max(0, info["config"].get("max_bytes", -1)))


async def storage_limit(connection: NatsConnection) -> int:
    """The most bytes that all streams of the account may have together; 0 where the broker sets no limit for it.
    BusError when it does not answer."""
    account = msgspec.json.decode(await connection.api("INFO"))
    return max(0, int(account.get("limits", {}).get("max_storage", -1)))


def _as_operator_set(config: dict[str, Any], now: dict[str, Any], size: int) -> dict[str, Any]:
    """The configuration for a stream that exists. size: the limit that the configuration names, 0 for none."""
    limit, planned = now.get("max_bytes", -1), config["max_bytes"]
    if size:
        limit = size
    elif planned > 0:
        limit = max(limit, planned)
    replicas = max(config["num_replicas"], now.get("num_replicas", 1))
    return config | {"max_bytes": limit, "num_replicas": replicas}


async def _put(connection: NatsConnection, config: dict[str, Any], size: int = 0) -> None:
    name = config["name"]
    try:
        try:
            info = msgspec.json.decode(await connection.api(f"STREAM.INFO.{name}", timeout=30.0))
        except ApiError as error:
            if error.err_code != _NOT_FOUND:
                raise
            config = config | ({"max_bytes": size} if size else {})
            await connection.api(f"STREAM.CREATE.{name}", config, timeout=30.0)
            return
        now = info["config"]
        config = _as_operator_set(config, now, size)
        if size and info["state"]["bytes"] > size:
            raise BusError(
                f"{name} holds {info['state']['bytes'] >> 20} MiB, more than the {size >> 20} MiB of [bus.stream_gib]: "
                f"purge some, or set a larger one"
            )
        if any(now.get(key, 0) != value for key, value in config.items() if value not in ("", False, 0, [])):
            await connection.api(f"STREAM.UPDATE.{name}", now | config, timeout=30.0)
    except ApiError as error:
        if error.err_code in (_NO_STORAGE, _NO_MEMORY):
            need = sum(stream.max_bytes for stream in STREAMS) >> 30
            raise BusError(
                f"the broker's disk is too small: {name} asks for {config['max_bytes'] >> 20} MiB, all streams for "
                f"{need} GiB without [bus.stream_gib], and the broker refuses ({error})"
            ) from None
        raise BusError(f"stream {name} cannot be declared: {error}") from error
