"""Declare every stream and bucket of `messages.subjects`; a declaration that exists is brought up to date.

`max_bytes` of a stream is reserved on the broker's disk at creation, 30 GiB for all of ours. An embedded broker on a
laptop therefore reserves nothing (the age limits and the trainer's purges bound it); production passes `reserve=True`
and is refused with one sentence when the disk is too small for the streams.
"""

from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError, StreamMissing
from headrace.bus.nats.connection import NatsConnection
from headrace.messages.subjects import KEY_VALUES, STREAMS, Stream

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
    }


def bucket_config(name: str, note: str, *, replicas: int) -> dict[str, Any]:
    """The broker's configuration of a key-value bucket (the layout of every NATS client)."""
    presence = name == "HR_PRESENCE"
    config: dict[str, Any] = {
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
        "duplicate_window": int((PRESENCE_S if presence else 120.0) * _SECOND),
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "deny_purge": False,
        "allow_direct": True,
    }
    if presence:
        # The broker replaces a lapsed entry by a marker, which watchers receive.
        config |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60 * _SECOND}
    return config


_SWITCHES = ("allow_direct", "allow_msg_ttl", "allow_rollup_hdrs")
NAMES = (*(stream.name for stream in STREAMS), *(f"KV_{name}" for name in KEY_VALUES))
"""Every stream that a broker must have; a bucket is a stream too."""


async def require(connection: NatsConnection) -> None:
    """StreamMissing, with the command that helps, unless the broker has every stream and bucket as actors need them."""
    absent: list[str] = []
    outdated: list[str] = []
    wanted = [config_of(stream, reserve=False, replicas=1) for stream in STREAMS]
    wanted += [bucket_config(name, note, replicas=1) for name, note in KEY_VALUES.items()]
    for config in wanted:
        name = config["name"]
        try:
            reply = await connection.patiently(lambda name=name: connection.api(f"STREAM.INFO.{name}"))  # type: ignore[misc]
            outdated += [f"{name}: {lack}" for lack in _lacks(config, msgspec.json.decode(reply)["config"])]
        except ApiError as error:
            if error.err_code not in (_NOT_FOUND, JETSTREAM_OFF):
                raise BusError(f"stream {name} cannot be looked up: {error}") from error
            absent.append(name)
    if absent:
        raise StreamMissing(
            f"the broker at {connection.url} lacks {len(absent)} of {len(NAMES)} streams ({', '.join(absent[:3])}"
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
        if key in wanted and now.get(key) != wanted[key]:
            lacks.append(f"{key} is {now.get(key)}, expected {wanted[key]}")
    lacks += [f"{key} is off" for key in _SWITCHES if wanted.get(key) and not now.get(key)]
    return lacks


async def declare(bus: Bus, *, reserve: bool = False, replicas: int = 1) -> None:
    """Make or update all streams and buckets; needs the admin role. BusError when the disk is too small."""
    for stream in STREAMS:
        await _put(bus.connection, config_of(stream, reserve=reserve, replicas=replicas))
    for name, note in KEY_VALUES.items():
        await _put(bus.connection, bucket_config(name, note, replicas=replicas))


async def _put(connection: NatsConnection, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        try:
            info = msgspec.json.decode(await connection.api(f"STREAM.INFO.{name}", timeout=30.0))
        except ApiError as error:
            if error.err_code != _NOT_FOUND:
                raise
            await connection.api(f"STREAM.CREATE.{name}", config, timeout=30.0)
            return
        now = info["config"]
        if any(now.get(key, 0) != value for key, value in config.items() if value not in ("", False, 0, [])):
            await connection.api(f"STREAM.UPDATE.{name}", now | config, timeout=30.0)
    except ApiError as error:
        if error.err_code in (_NO_STORAGE, _NO_MEMORY):
            need = sum(stream.max_bytes for stream in STREAMS) >> 30
            raise BusError(
                f"the broker's disk is too small: {name} asks for {config['max_bytes'] >> 20} MiB, all streams for "
                f"{need} GiB, and the broker refuses ({error})"
            ) from None
        raise BusError(f"stream {name} cannot be declared: {error}") from error
