"""Whether the task suites exist, are certified, and whether this machine's backend can open their sandboxes."""

from collections.abc import Iterator, Sequence
from itertools import islice

from headrace.config import Config
from headrace.launch.checks.finding import Finding, bad, good
from headrace.ledger.training import evaluated
from headrace.messages.sandbox import Acquire
from headrace.messages.tasks import Task
from headrace.registry import PluginError
from headrace.tasks import UnknownSuite, certificates, open_suite
from headrace.tasks.base import Suite, both_sides, try_first
from headrace.tasks.overlap import overlap
from headrace.tasks.sandboxes import for_task
from headrace.vmhost.backend import demands
from headrace.vmhost.backends.registry import backend_class
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base

MOST = 5000
"""Tasks of a suite whose sandboxes are checked: reading each takes a tenth of a millisecond."""
SHOWN = 3
"""Names that a finding lists."""


def used(config: Config) -> dict[str, str]:
    """Name to key of the suites that a run takes tasks from."""
    section = config.evaluation
    named = [("tasks.suite", config.tasks.suite)]
    if section.heldout_tasks or config.gate.tasks:
        named.append(("tasks.heldout", config.tasks.heldout))
    if section.unseen_tasks:
        named.append(("tasks.unseen", config.tasks.unseen))
    if section.every:
        named += [("evaluation.every_suites", name) for name in section.every_suites]
    return {name: key for key, name in reversed(named)}


def check(config: Config) -> Iterator[Finding]:
    """Findings about [tasks], for a host that makes tasks of suites."""
    opened = True
    for name, key in used(config).items():
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
            yield bad(key, f"{error}; copy {name} into {config.tasks.dir}/, or name another suite in {key}")
            opened = False
    if opened:
        training = open_suite(config.tasks.suite, config.tasks.dir)
        if refused := overlap(training, evaluated(config), config.tasks.dir).refused:
            yield bad("tasks.suite", refused)


def sandboxes(config: Config) -> Iterator[Finding]:
    """Findings about the sandboxes that the suites' tasks need, for a host with the environment actor."""
    section = config.environment
    try:
        backend = backend_class(section.backend)
    except VmhostError:
        return  # a finding of the machine's
    lacking: set[str] = set()
    machines: dict[str, bool] = {}
    for task, machine in _tasks(config):
        lacking |= set(backend.capabilities.missing(demands(for_task(_REQUEST, task))))
        machines[machine] = machine != task.template
    able = backend.capabilities.upper_diff
    unknown = {name: why for name in machines if able and (why := _lacks(config, name))}
    if lacking:
        yield bad(
            "environment.backend",
            f"{section.backend} lacks {', '.join(sorted(lacking))}, which tasks of the suites need; set "
            "environment.backend = 'qemu', or name other suites",
        )
    elif unknown:
        names = sorted(unknown)
        yield bad(
            "environment.cache_dir",
            f"{section.cache_dir} lacks {len(names)} of the images of the suites' tasks, such as "
            f"{', '.join(names[:SHOWN])}: {unknown[names[0]]}; run `headrace images pull --suite NAME`, or set "
            "environment.cache_dir to the folder that has them",
        )
    elif images := sum(machines.values()):
        yield good("environment.cache_dir", f"all {images} images of the suites' tasks are stored")


_REQUEST = Acquire(run="check", lane="train", role="rollout", group="g", slot=0, attempt=1, isolation="group")


def _tasks(config: Config) -> Iterator[tuple[Task, str]]:
    """The tasks of the run's suites that need a sandbox, each with its machine and its verifier's."""
    for name in used(config):
        try:
            suite = open_suite(name, config.tasks.dir)
            for id in islice(sampled(suite), MOST):
                task, oracle = both_sides(suite, id)
                if task.sandbox:
                    yield task, task.machine
                    if oracle.verifier:
                        yield task, oracle.verifier.image
        except (UnknownSuite, PluginError):
            continue  # a finding of the suites'


def sampled(suite: Suite) -> Iterator[str]:
    """The ids of tasks that stand for the suite: all, or the sample of a generated one."""
    ids: Sequence[str] = certificates.sample_of(suite)
    return iter(ids if len(ids) <= MOST or not certificates.source_of(suite) else ids[:1])


def _lacks(config: Config, name: str) -> str:
    """Why this node cannot make a machine of this template or image; empty where it can."""
    try:
        base.plan(config.environment, name)
    except VmhostError as error:
        return str(error)
    return ""
