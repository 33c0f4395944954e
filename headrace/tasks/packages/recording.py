"""Results of the untouched code where a test compares two computed values: the answers that make it a sealed test.

A value may be recorded only if it does not depend on where and when it is computed. The processes that run tests here
are forks of one interpreter, with its hash seed: an order of strings in a set would be the same in all of them, and
another in the next template. So the tests run again in fresh sandboxes by interpreters of their own, with hash seeds
and random numbers of their own, one of them in another year. A value that differs anywhere, or is missing anywhere, is
not recorded: the two values are then compared with each other (tasks/sealing.py).

The other year is Python's alone (`time`, and `datetime` in its pure form, which asks `time`): a test that looks at the
times of files as well may fail there, and is not recorded.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from headrace.messages.sandbox import Exec, ReadFile, Sandbox, SandboxLost, TestOutcome
from headrace.messages.tasks import TestPlan
from headrace.tasks.sealing import Answers, Sealed, recorded
from headrace.vmhost import agent_files
from headrace.vmhost.guest.testing import pytests

RUNS = (("1", 0), ("2", 500 * 86400 + 12345))
"""Hash seed, and seconds from now."""
_FOLDER = ".headrace-cold"
_ROOM = 32 << 20
"""Characters of observations of a run here; the judge's runs stop at the lower `observing.LIMIT`."""
_RUN = f"""
import os, sys, time
later = int(sys.argv[1])
if later:
    sys.modules["_datetime"] = sys.modules["_zoneinfo"] = None  # the second is built on the first
    now, now_ns, local, utc, text = time.time, time.time_ns, time.localtime, time.gmtime, time.strftime
    time.time = lambda: now() + later
    time.time_ns = lambda: now_ns() + later * 10**9
    time.localtime = lambda seconds=None: local(time.time() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: utc(time.time() if seconds is None else seconds)
    time.strftime = lambda form, moment=None: text(form, time.localtime() if moment is None else moment)
    time.asctime = lambda moment=None: text("%a %b %e %H:%M:%S %Y", time.localtime() if moment is None else moment)
    time.ctime = lambda seconds=None: time.asctime(time.localtime(seconds))
sys.path.insert(0, os.path.abspath("{_FOLDER}"))
from guest.testing import observing, pytests
observing.LIMIT = {_ROOM}
pytests._run(os.getcwd(), sys.argv[2:], os.open("{_FOLDER}/report", os.O_WRONLY | os.O_CREAT))
"""


class RecordingSandboxes(Protocol):
    """Where to run."""

    def sandbox(self, files: dict[str, bytes], lane: int, alone: bool) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox with these files."""


async def record(
    where: RecordingSandboxes,
    files: Mapping[str, bytes],
    plan: TestPlan,
    sealed: Sealed,
    tests: Sequence[TestOutcome],
    first: Sequence[TestOutcome] | None = None,
) -> Answers:
    """The answers of an ordinary right run (`tests`) of the sealed tests, with the values that two further ones saw as
    well. files: the untouched package; first: what `everything` gave for these sealed tests, which is the first of the
    two."""
    if all(sealed.literals.values()):
        return recorded(sealed, tests)
    tree = {**files, **sealed.files}
    further = await asyncio.gather(*(_cold(where, tree, plan, *how) for how in RUNS[0 if first is None else 1 :]))
    return recorded(sealed, tests, *(() if first is None else (first,)), *further)


async def everything(where: RecordingSandboxes, files: dict[str, bytes], plan: TestPlan) -> tuple[TestOutcome, ...]:
    """Tests that pass, with the values that they observe, up to `_ROOM` characters. Empty when the run did not end."""
    return await _cold(where, files, plan, *RUNS[0])


async def _cold(
    where: RecordingSandboxes, files: dict[str, bytes], plan: TestPlan, seed: str, later: int
) -> tuple[TestOutcome, ...]:
    """Outcomes in an interpreter that is started for this run; empty when the run did not end."""
    tools = {f"{_FOLDER}/guest/{name}": source for name, source in agent_files.sources().items()}
    argv = ("python3", "-B", "-c", _RUN, str(later), *plan.paths)
    try:
        async with where.sandbox(files | tools, 0, True) as sandbox:
            ran = await sandbox.call(Exec(argv=argv, env={"PYTHONHASHSEED": seed}, timeout_s=plan.timeout_s))
            report = await sandbox.call(ReadFile(path=f"{_FOLDER}/report", limit=2 * _ROOM))
        rows = pytests.counted(report.data, ran.code)
    except (SandboxLost, ValueError, LookupError, TypeError, RecursionError):
        return ()
    return tuple(TestOutcome(name, "passed", "", tuple(seen)) for name, outcome, _, seen in rows if outcome == "passed")
