"""`headrace tasks probe`: samples each task of a suite k times and selects the tasks that the policy solves sometimes.

The attempts are evaluations, one per attempt of all tasks, in a run of the probe's own or in the policy's run. Their
ids follow from the name of the selection, so a call that was killed continues: what is on record is not repeated.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from headrace.bench.requests import requests
from headrace.config import Config
from headrace.inner_paths import inner
from headrace.launch.measuring.evaluation import (
    Measurable,
    Measurement,
    ask,
    first_request,
    open_run,
    policy_of,
    prepare,
    serve,
)
from headrace.launch.output import say
from headrace.launch.runs import RunError
from headrace.launch.supervision.signals import Stopping, interruptible
from headrace.messages.evaluation import EvalResult
from headrace.messages.rollout import PolicyRef
from headrace.tasks import open_suite
from headrace.tasks.base import trust_of, try_first
from headrace.tasks.suites import write_index

MOST = 20_000
"""Tasks of a probe without a number of its own."""
FILE = "probe.json"


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that a selection keeps."""

    attempts: int
    low: int
    """Least attempts that pass."""
    high: int
    """Most attempts that pass."""

    def keeps(self, passed: int, measured: int) -> bool:
        """Whether a task is kept. measured: its attempts with a verdict; the others say nothing about the policy."""
        return passed >= self.low and measured - passed >= self.attempts - self.high


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a probe, in the folder of its selection."""

    suite: str
    policy: str
    run: str
    version: int
    band: Band
    kept: int
    histogram: tuple[int, ...]
    """Tasks by the number of their attempts that passed, 0 to `attempts`; of tasks with a verdict for every attempt."""
    unmeasured: int
    """Tasks of which infrastructure failed an attempt."""
    tasks: dict[str, tuple[int, int]]
    """Task to (passed, measured), in the suite's order."""


def of_results(results: Sequence[EvalResult], ids: Sequence[str], band: Band, policy: str, run: str) -> Probe:
    """The record of finished evaluations, one per attempt. ids: the tasks in order."""
    passed = Counter(task for result in results for task, done in result.passes.items() if done)
    measured = Counter(task for result in results for task in result.passes)
    whole = Counter(passed[id] for id in ids if measured[id] == band.attempts)
    return Probe(
        suite=results[0].suite,
        policy=policy,
        run=run,
        version=results[0].version,
        band=band,
        kept=sum(band.keeps(passed[id], measured[id]) for id in ids),
        histogram=tuple(whole[number] for number in range(band.attempts + 1)),
        unmeasured=len(ids) - whole.total(),
        tasks={id: (passed[id], measured[id]) for id in ids},
    )


async def probe(config: Config, name: str, band: Band, policy: str = "", tasks: int = 0) -> int:
    """Sample, then write the selection and its record; 1 when no task is kept.

    name: of the selection. policy: as `headrace eval` names it; empty: the one with which the configuration's run
    begins. tasks: number of tasks, from the suite's first; 0 means all.
    """
    if not 0 <= band.low <= band.high <= band.attempts:
        raise RunError(f"expected 0 <= --low <= --high <= {band.attempts}, got {band.low} and {band.high}")
    suite = open_suite(config.tasks.suite, config.tasks.dir)
    try_first(suite)
    if not tasks and len(suite.ids()) > MOST:
        raise RunError(f"{suite.name} has {len(suite.ids())} tasks: say by --tasks how many of them are sampled")
    ids = list(dict.fromkeys(suite.ids()[number] for number in range(min(tasks or MOST, len(suite.ids())))))
    named = policy_of(policy) if policy else Measurable("", PolicyRef("pinned", 0), publishes=True)
    try:
        folder = inner(Path(config.tasks.dir), name)
    except ValueError as error:
        raise RunError(f"--out: {error}") from None
    if folder.exists() and not (folder / FILE).is_file():
        raise RunError(f"{folder} exists and is no selection of a probe; choose another --out")

    id = f"probe-{name.replace('/', '-')}"

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        await prepare(config, closing)
        run = open_run(config, named, stopping, closing, id)
        stopping.effect = f"the probe ends unfinished; the same command continues it from {run.folder.path}/"
        ref = await serve(run, named, closing)
        wanted = Measurement(policy=policy, suite=suite.name, temperature=config.curriculum.temperature)
        asked = first_request(run, wanted, ref, id, f"probe {name}")
        results = await ask(run, requests(msgspec.structs.replace(asked, ids=tuple(ids)), band.attempts))
        made = of_results(results, ids, band, policy or config.policy.checkpoint or "own", run.folder.id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        for number, count in enumerate(made.histogram):
            say(f"{number} of {band.attempts} solved: {count} tasks")
        if made.unmeasured:
            say(f"infrastructure failed attempts at {made.unmeasured} tasks")
        chosen = [id for id, (passed, measured) in made.tasks.items() if band.keeps(passed, measured)]
        if not chosen:
            say(f"no task has {band.low} to {band.high} of {band.attempts} attempts solved; see {folder / FILE}")
            return 1
        source = (
            f"{band.low} to {band.high} of {band.attempts} attempts solved by {made.policy}, version {made.version}"
        )
        write_index(name, folder, chosen, source, trust_of(suite), of=suite.name)
        say(f'{len(chosen)} of {len(ids)} tasks are kept: set [tasks] suite = "{name}"')
        return 0

    return await interruptible(body)
