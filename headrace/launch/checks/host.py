"""All checks of one machine: for the actors that it runs, or for a whole run."""

import ctypes
from collections.abc import AsyncIterator

from headrace.config import Config
from headrace.launch.checks import actors, machine, model, network, suites, trainer, versions
from headrace.launch.checks.finding import Finding, Roles, bad, wanted

UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2): no program keeps the clock right."""


async def check(config: Config, roles: Roles = frozenset()) -> AsyncIterator[Finding]:
    """Findings about this machine. roles: kinds of the actors that it runs; all where there are none."""
    for finding in actors.check(config):
        yield finding
    if wanted(roles, "curriculum", "certifier", "evaluator", "environment", "judge", "feedback"):
        for finding in suites.check(config):
            yield finding
    if wanted(roles, "environment"):
        for finding in suites.sandboxes(config):
            yield finding
    for finding in machine.check(config, roles):
        yield finding
    if wanted(roles, "trainer"):
        for finding in model.check(config):
            yield finding
    if wanted(roles, "rollout"):
        for finding in model.engine(config.engine):
            yield finding
    for finding in trainer.check(config, roles):
        yield finding
    async for finding in network.check(config, roles):
        yield finding
    if wanted(roles, "trainer", "rollout", "weight_sender", "weight_receiver"):
        async for finding in versions.check(config, roles):
            yield finding
    if config.bus.url and "127.0.0.1" not in config.bus.url and clock_state() == UNSYNCHRONISED:
        yield bad(
            "bus.url",
            "this machine's clock is not kept right, and leases and waits compare clocks of several hosts: start "
            "chrony, systemd-timesyncd or another NTP client",
        )


def clock_state() -> int:
    """The state of the kernel's clock, by adjtimex(2); -1 where it cannot be read."""
    timex = ctypes.create_string_buffer(512)  # struct timex has 208 bytes; `modes` 0 reads
    return int(ctypes.CDLL(None).adjtimex(timex))
