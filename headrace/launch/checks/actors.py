"""Whether the process groups contain every actor that the run needs."""

from collections import Counter
from collections.abc import Iterator

from headrace.actors.registry import ACTORS
from headrace.config import Config
from headrace.launch.checks.finding import Finding, bad, good

NEEDED = ("curriculum", "evaluator", "environment", "judge", "rollout", "trainer", "weight_sender", "weight_receiver")
PRODUCT = ("gateway", "feedback", "scavenger")
"""Also needed when [production] is enabled."""
SINGLE = ("curriculum", "evaluator", "trainer", "weight_sender", "scavenger")
"""Actors of which a run has one. If there are two, the broker refuses the writes of the earlier one."""


def check(config: Config) -> Iterator[Finding]:
    """Findings about [processes] and [production]."""
    entries = [name for group in config.processes.groups for name in group]
    names = Counter(name.partition(":")[0] for name in entries)
    problems = list(_groups(config, entries, names))
    yield from problems or [good("processes", f"{len(entries)} actors in {len(config.processes.groups)} processes")]


def _groups(config: Config, entries: list[str], names: Counter[str]) -> Iterator[Finding]:
    for name in names:
        if name not in ACTORS:
            yield bad("processes.groups", f"there is no actor {name!r}; expected one of {', '.join(ACTORS)}")
    for entry, count in Counter(entries).items():
        if count > 1:
            yield bad(
                "processes.groups",
                f"{entry!r} is listed {count} times; list it once, or give each one an id, as in {entry}:a",
            )
    for name in SINGLE:
        if names[name] > 1 and entries.count(name) <= 1:
            yield bad("processes.groups", f"a run has one {name}, got {names[name]}; keep one of them")
    asked = ("certifier",) if config.tasks.certify else ()
    for name in (*NEEDED, *asked, *(PRODUCT if config.production.enabled else ())):
        if not names[name]:
            yield bad("processes.groups", f"no process has the actor {name!r}, which this run needs; add it to a group")
    if config.production.enabled:
        ids = {entry.partition(":")[2] for entry in entries if entry.startswith("rollout:")}
        for wanted in config.production.rollouts:
            if wanted not in ids:
                yield bad(
                    "production.rollouts",
                    f"no process has the actor 'rollout:{wanted}'; add it to processes.groups, or drop the id",
                )
