"""The processes of a deployment: those of [processes], each with its command, and what it needs of its host."""

from typing import NamedTuple

from headrace.bus.broker.server import CONF
from headrace.config import Config, ConfigError
from headrace.launch.processes import process_groups
from headrace.launch.site import Site, site_of

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
    device: bool
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
    places = {"trainer": trainer, "rollout": trainer if engine == "auto" else engine}
    devices = {actor for actor, device in places.items() if device.startswith("cuda")}
    planned = []
    for group in process_groups(config):
        kinds = {name.partition(":")[0] for name in group}
        name = group[0].replace(":", "-").replace("_", "-")
        containers = config.environment.backend == "container" and bool(kinds & MACHINES)
        planned.append(Process(name, group, bool(kinds & MACHINES), bool(kinds & devices), containers))
    return planned


def page(config: Config) -> tuple[Process, Site] | None:
    """The process of the live page on the broker's host, and where it listens; None without a page. ConfigError."""
    site = site_of(config)
    return (Process(PAGE, (), machines=False, device=False), site) if site is not None else None


def broker_conf(config: Config, credentials: str = "", host: str = "") -> str:
    """nats.conf of the run's broker, with its WebSocket. credentials: its folder there. host: where it listens, if not
    at the addresses of `[dashboard]`."""
    site = site_of(config)
    return CONF.read_text() + (site.conf(credentials or CREDENTIALS, host) if site is not None else "")


CREDENTIALS = "/etc/headrace/credentials"
