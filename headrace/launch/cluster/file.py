"""The cluster's file: hosts, and for each the processes that run there, with their devices and environment."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.config import ConfigError, Section
from headrace.config.base import PATH, WORDS, ActorName, Count, Host, OptionalToken, Text, Token
from headrace.config.base import Path as PathText

Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SshPort = Annotated[int, Meta(ge=1, le=65535)]


class Process(Section, frozen=True, kw_only=True):
    """One process of a host: actors, a command such as an inference server, or the broker."""

    name: OptionalToken = ""
    """Name of the process and of its log. Empty: the first actor's name, or `broker`. A command needs a name."""
    actors: tuple[ActorName, ...] = ()
    command: tuple[Text, ...] = ()
    broker: bool = False
    """A nats-server at the address of `[bus] url`, with its store in the host's folder."""
    devices: tuple[Count, ...] = ()
    """Accelerators that the process sees, as CUDA_VISIBLE_DEVICES. Empty: those that the host's environment names."""
    environment: dict[Variable, Text] = msgspec.field(default_factory=dict)
    set: tuple[Text, ...] = ()
    """Overrides of the run's configuration for these actors alone: section.key=value."""


class Node(Section, frozen=True, kw_only=True):
    """One host: how ssh reaches it, where headrace is, and what runs there."""

    name: Token
    address: Host
    port: SshPort = 22
    user: Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_.-]*)?$")] = ""
    folder: PathText
    """Absolute; the launcher writes configuration and keys there, processes write their logs, runs and streams."""
    python: PathText = "/opt/headrace/bin/python"
    """The interpreter of the host's virtual environment with headrace."""
    environment: dict[Variable, Text] = msgspec.field(default_factory=dict)
    """Environment variables of every process of the host."""
    processes: Annotated[tuple[Process, ...], Meta(min_length=1)]


class Cluster(Section, frozen=True, kw_only=True):
    """The whole file."""

    run: PathText
    """The run's TOML, relative to this file."""
    ssh: tuple[Text, ...] = ()
    """Further options of ssh, for all hosts."""
    hosts: Annotated[tuple[Node, ...], Meta(min_length=1)]


def read(path: Path) -> Cluster:
    """The cluster of a file. ConfigError names the host, the key and what was expected."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; start from deploy/hosts/cluster.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        cluster = msgspec.convert(raw, Cluster)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), raw)}") from None
    for where, what in _problems(cluster):
        raise ConfigError(f"{path}: {where}: {what}")
    return cluster


def name_of(process: Process) -> str:
    """The name of a process and of its log."""
    if process.name or process.command:
        return process.name
    return "broker" if process.broker else process.actors[0].replace(":", "-") if process.actors else ""


def _explain(message: str, raw: dict[str, Any]) -> str:
    """The error of a value: its host by name in place of its index, its key, what was expected."""
    what, _, where = message.partition(" - at `")
    where = re.sub(r"^(key in )?\$\.?", "", where.removesuffix("`"))
    for regex, words in (*WORDS.items(), (PATH, WORDS[PATH])):
        if repr(regex) in what:
            what = f"expected {words}"
    place = re.match(r"hosts\[(\d+)\]\.?", where)
    if place:
        name = raw["hosts"][int(place.group(1))].get("name", f"number {int(place.group(1)) + 1}")
        where = f"host {name}: {where[place.end() :]}".rstrip(": ")
    return f"{where or 'top level'}: {what[:1].lower()}{what[1:]}"


def _problems(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Place and sentence of every problem; the caller reports the first."""
    names = [host.name for host in cluster.hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"host {name}", "two hosts have this name; give each its own"
    brokers = [host.name for host in cluster.hosts for process in host.processes if process.broker]
    if len(brokers) > 1:
        yield f"host {brokers[1]}", f"host {brokers[0]} has the broker already; a run has one"
    for host in cluster.hosts:
        if not host.folder.startswith("/"):
            yield f"host {host.name}: folder", f"expected an absolute path, got {host.folder!r}"
        taken: dict[int, str] = {}
        seen: set[str] = set()
        for process in host.processes:
            name = name_of(process)
            where = f"host {host.name}: process {name or 'without a name'}"
            if bool(process.actors) + bool(process.command) + process.broker != 1:
                yield where, "expected exactly one of actors, command and broker = true"
            if not name:
                yield where, "a command needs a name; set name"
            if name in seen:
                yield where, "another process of the host has this name; set name"
            seen.add(name)
            if process.set and not process.actors:
                yield where, "set changes the configuration of actors; this process has none"
            for device in process.devices:
                if device in taken:
                    yield where, f"device {device} belongs to process {taken[device]} already"
                taken[device] = name
