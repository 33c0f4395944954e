"""The processes of a deployment: those of [processes], each with its command, and what it needs of its host."""

from typing import NamedTuple

from headrace.config import Config, ConfigError
from headrace.launch.processes import process_groups

MACHINES = {"environment"}
"""Actors that start virtual machines: they need /dev/kvm where the host has it."""
DEVICES = {"trainer", "rollout"}
"""Actors that use an accelerator where `[trainer] device` names one."""


class Process(NamedTuple):
    """One process of a run."""

    name: str
    actors: tuple[str, ...]
    machines: bool
    device: bool

    @property
    def words(self) -> list[str]:
        """Arguments of `headrace` that start it."""
        return ["actor", ",".join(self.actors), "--config", "/etc/headrace/run.toml"]


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
    device = config.trainer.device.startswith("cuda")
    found = []
    for group in process_groups(config):
        kinds = {name.partition(":")[0] for name in group}
        name = group[0].replace(":", "-").replace("_", "-")
        found.append(Process(name, group, bool(kinds & MACHINES), device and bool(kinds & DEVICES)))
    return found


CREDENTIALS = "/etc/headrace/credentials"
