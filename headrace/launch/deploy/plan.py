"""The processes of a deployment, made from [processes]: each has its command and what it needs of its host.

A version is a file, so its readers must share files with its writer: the sender goes where the trainer is, and a
receiver goes where rollout actors are. A process with both is therefore two here.
"""

import itertools
from typing import NamedTuple

from headrace.bus.broker.server import CONF
from headrace.config import Config, ConfigError
from headrace.launch.checks import servers
from headrace.launch.processes import process_groups
from headrace.launch.site import Site, site_of

VERSIONS = ("weight_sender", "weight_receiver")
MACHINES = {"environment"}
"""Actors that start virtual machines: they need /dev/kvm where the host has it."""
PAGE = "dashboard"
"""Name of the process that serves the live page, and its command."""


class Process(NamedTuple):
    """One process of a run."""

    name: str
    actors: tuple[str, ...]
    """None for the live page."""
    machines: bool
    devices: int
    """GPUs."""
    root: bool = False
    """Whether it makes containers, which needs root."""

    @property
    def words(self) -> list[str]:
        """Arguments of `headrace` that start it."""
        return [*self.command, "--config", "/etc/headrace/run.toml"]

    @property
    def command(self) -> list[str]:
        """The same without a configuration."""
        return ["actor", ",".join(self.actors)] if self.actors else [PAGE]


def processes(config: Config) -> list[Process]:
    """Every process of the configuration. ConfigError without [run] id and [bus] url and credentials: processes of
    several hosts cannot agree on values that one of them generates."""
    for key, value in (("run.id", config.run.id), ("bus.url", config.bus.url)):
        if not value:
            raise ConfigError(
                f"{key}: expected a value: the processes of a deployment find each other by it; set {key}"
            )
    if config.bus.credentials != CREDENTIALS:
        raise ConfigError(f"bus.credentials: expected {CREDENTIALS!r}, where every generated file puts the seeds")
    trainer, engine = config.trainer.device, config.engine.device
    served = servers.options_of(config.engine)
    used = sum(seen.count(",") + 1 for seen in served.server_devices) if served is not None else 0
    places = {
        "trainer": (trainer, config.trainer.machine_ranks),
        "rollout": (trainer if engine == "auto" else engine, used or 1),
    }
    devices = {actor: count for actor, (device, count) in places.items() if device.startswith("cuda")}
    planned = []
    for group in itertools.chain.from_iterable(map(_apart, process_groups(config))):
        kinds = {name.partition(":")[0] for name in group}
        name = group[0].replace(":", "-").replace("_", "-")
        containers = config.environment.backend == "container" and bool(kinds & MACHINES)
        gpus = sum(count for actor, count in devices.items() if actor in kinds)
        planned.append(Process(name, group, bool(kinds & MACHINES), gpus, containers))
    return planned


def _apart(group: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A process; one with both the sender and the receiver of versions without them, which are processes of their own
    then."""
    if not set(VERSIONS) <= {name.partition(":")[0] for name in group}:
        return [group]
    rest = tuple(name for name in group if name.partition(":")[0] not in VERSIONS)
    return [*([rest] if rest else []), *((name,) for name in group if name not in rest)]


def page(config: Config) -> tuple[Process, Site] | None:
    """The process of the live page on the broker's host, and where it listens; None without a page. ConfigError."""
    site = site_of(config)
    return (Process(PAGE, (), machines=False, devices=0), site) if site is not None else None


def broker_conf(config: Config, credentials: str = "", host: str = "") -> str:
    """nats.conf of the run's broker, with its WebSocket. credentials: its folder there. host: where it listens, if not
    at the addresses of `[dashboard]`."""
    site = site_of(config)
    return CONF.read_text() + (site.conf(credentials or CREDENTIALS, host) if site is not None else "")


CREDENTIALS = "/etc/headrace/credentials"
