"""Test runs over a package in fresh sandboxes, and the exam that a repair is judged by.

Each run has a sandbox of its own, but the sandboxes of a lane are slots of one machine for as long as it has free ones:
a machine that has run the tests before runs them several times faster under emulation.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.sandbox import Acquire, NoCapacity, OpResult, RunTests, Sandbox, SandboxLost
from headrace.messages.tasks import TestPlan
from headrace.tasks import sealing

FIRST_RUN_S = 300.0
"""Seconds that a package's tests may take; the tasks' own limit follows from what they took."""


CAPACITY_S = 300.0
"""Seconds to wait for a sandbox while this lab holds none: nothing that it does would free capacity."""


class SuiteError(HeadraceError):
    """No suite can be made of this package; one sentence says why."""


class HeldSandbox(Sandbox, Protocol):
    """A sandbox that can be given back."""

    @property
    def id(self) -> str:
        """What `release` takes."""


class LabSandboxes(Protocol):
    """Where sandboxes come from; `vmhost.node.host.Host` is one."""

    async def acquire(self, request: Acquire, /) -> HeldSandbox:
        """A fresh sandbox. NoCapacity, SandboxLost."""

    def release(self, id: str, /) -> object:
        """Give it back."""


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a repair: the package's tests, sealed where they compare with literals."""

    plan: TestPlan
    expected: tuple[str, ...]
    """Names of the tests, sorted."""
    sealed: dict[str, bytes] = {}
    answers: sealing.Answers = {}


class Lab:
    """Fresh sandboxes, as many as the host has capacity for."""

    def __init__(self, sandboxes: LabSandboxes, run: str, template: str) -> None:
        self._sandboxes, self._run, self._template = sandboxes, run, template
        self._count = self._open = 0

    @asynccontextmanager
    async def sandbox(self, files: dict[str, bytes], lane: int, alone: bool) -> AsyncIterator[Sandbox]:
        """A sandbox with these files; waits while the host has no capacity. SuiteError after `CAPACITY_S` without."""
        self._count += 1
        request = Acquire(
            run=self._run,
            lane="eval",
            role="rollout",
            group=f"s{self._count:06d}" if alone else f"lane{lane}",
            slot=self._count,
            attempt=0,
            isolation="episode" if alone else "group",
            template=self._template,
            lease_s=2 * FIRST_RUN_S,
            files=files,
        )
        since = time.monotonic()
        while True:
            try:
                held = await self._sandboxes.acquire(request)
                break
            except NoCapacity as error:
                if self._open:
                    since = time.monotonic()
                elif time.monotonic() - since > CAPACITY_S:
                    raise SuiteError(
                        f"no sandbox had capacity within {CAPACITY_S:g} s ({error}): end what else uses the machine's "
                        "sandboxes, or raise [environment] max_vms"
                    ) from None
                await asyncio.sleep(0.2)
        self._open += 1
        try:
            yield held
        finally:
            self._open -= 1
            self._sandboxes.release(held.id)

    async def run(self, files: dict[str, bytes], plan: TestPlan, lane: int = 0) -> OpResult:
        """The tests over these files in a fresh sandbox. A test of another lane may cause the loss of a sandbox, so the
        tests then run once more, alone. When that sandbox is lost too, the result is not ok."""
        for alone in (False, True):
            try:
                async with self.sandbox(files, lane, alone) as sandbox:
                    return await sandbox.call(RunTests(plan=plan))
            except SandboxLost as error:
                lost = OpResult(ok=False, error=str(error))
        return lost

    async def judge(self, files: dict[str, bytes], exam: Exam, lane: int = 0) -> OpResult:
        """The exam over a repository, with the outcomes that the judge would see."""
        return judged(await self.run(files | exam.sealed, exam.plan, lane), exam)


def judged(result: OpResult, exam: Exam) -> OpResult:
    """A run of the exam's tests with the outcomes that the judge would see."""
    return msgspec.structs.replace(result, tests=sealing.compare_answers(result.tests, exam.answers))


def passed(result: OpResult) -> tuple[str, ...]:
    """Names of the tests that passed, sorted."""
    return tuple(sorted(test.name for test in result.tests if test.outcome == "passed"))
