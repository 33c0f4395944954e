"""Whether the process groups contain every actor that the run needs, and whether its task suites exist."""

from collections import Counter
from collections.abc import Iterator

from headrace.actors.registry import ACTORS
from headrace.config import Config
from headrace.launch.checks.finding import Finding, bad, good
from headrace.ledger.training import evaluated
from headrace.registry import PluginError
from headrace.tasks import UnknownSuite, certificates, open_suite
from headrace.tasks.base import try_first
from headrace.tasks.overlap import overlap

NEEDED = ("curriculum", "evaluator", "environment", "judge", "rollout", "trainer", "weight_sender", "weight_receiver")
PRODUCT = ("gateway", "feedback", "scavenger")
"""Also needed when [production] is enabled."""
SINGLE = ("curriculum", "evaluator", "trainer", "weight_sender", "scavenger")
"""Actors of which a run has one. If there are two, the broker refuses the writes of the earlier one."""


def check(config: Config) -> Iterator[Finding]:
    """Findings about [processes], [production] and [tasks]."""
    entries = [name for group in config.processes.groups for name in group]
    names = Counter(name.partition(":")[0] for name in entries)
    problems = list(_groups(config, entries, names))
    yield from problems or [good("processes", f"{len(entries)} actors in {len(config.processes.groups)} processes")]
    wanted = {
        "tasks.suite": config.tasks.suite,
        "tasks.heldout": config.tasks.heldout,
        "tasks.unseen": config.tasks.unseen,
    }
    measured = (("evaluation.every_suites", name) for name in config.evaluation.every_suites)
    opened = True
    for key, name in (*wanted.items(), *measured):
        try:
            suite = open_suite(name, config.tasks.dir)
            try_first(suite)
            if key == "tasks.suite" and (refused := certificates.forgeable(suite, config.tasks.at_risk)):
                yield bad(key, refused)
            elif (
                key == "tasks.suite"
                and not config.tasks.certify
                and (
                    refused := certificates.refusal(
                        suite, config.tasks.dir, config.tasks.uncertified, config.tasks.at_risk
                    )
                )
            ):
                yield bad(key, refused)
        except (UnknownSuite, PluginError) as error:
            yield bad(key, f"{error}; name another suite in {key}")
            opened = False
    if opened:
        training = open_suite(config.tasks.suite, config.tasks.dir)
        if refused := overlap(training, evaluated(config), config.tasks.dir).refused:
            yield bad("tasks.suite", refused)


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
