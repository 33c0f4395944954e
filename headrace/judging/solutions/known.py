"""The known solution of a task as changes of a sandbox.

Files over a template are such changes already. A solution that is a program, or that belongs into a container image,
is made in a fresh sandbox, as the agent's, and pulled from there in the way in which a rollout pulls an attempt: its
modes, links and deletions are part of it, and paths that the task does not allow are left out.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.judging.grading import tail
from headrace.judging.machines import Machines
from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import (
    Acquire,
    Exec,
    NoCapacity,
    OpResult,
    Sandbox,
    SandboxLost,
    Snapshot,
    WriteFiles,
)
from headrace.messages.tasks import ANSWER, HOST_FOLDER, PROGRAM, Change, Oracle, StepTests, Task, interpreter
from headrace.sandboxes.calls import NodeSilent, Superseded
from headrace.tasks.certificates import task_hash
from headrace.tasks.diff import PULL_LIMIT, TreeTooLarge, pull
from headrace.tasks.sandboxes import begin_step, for_task, write
from headrace.terminal_text import plain

_ORIGINALS = 4 << 20
"""Bytes of the largest original that is read: functions are compared with it."""
TRIES = 3
"""Number of sandboxes that our own parts may lose before the failure is raised."""
DEATHS = 2
"""Number of sandboxes that may end while the solution's program runs, before the solution is refused."""
RETRY_S = 0.5
"""Pause before another sandbox is asked for, times the number of failures."""
SHOWN = 5
"""Paths that a sentence about a solution names at most."""


class NoSolution(HeadraceError):
    """The known solution cannot be made; the text says why."""

    output = ""
    """The end of what its program printed."""


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """A solution as changes of a workspace."""

    last: Snapshot = Snapshot(diff={})
    """The changes at its end; in an image every change, and the former content of changed files."""
    earlier: tuple[Snapshot, ...] = ()
    """In a task with steps: the changes at the end of each step but the last."""

    def only(self, files: Mapping[str, bytes]) -> "Solution":
        """Other contents of some of its files, without its other changes."""
        entries = tuple(change for change in self.last.changes if change.kind == "file" and change.path in files)
        last = Snapshot(diff=dict(files), changes=entries, originals=self.last.originals)
        return Solution(last=last, earlier=self.earlier)

    def over(self, files: Mapping[str, bytes]) -> "Solution":
        """All of its changes, with other contents of some of its files, also at the end of earlier steps that had
        them."""
        earlier = []
        for step in self.earlier:
            same = {path for path, data in step.diff.items() if data == self.last.diff.get(path)}
            others = {path: data for path, data in files.items() if path in same}
            earlier.append(msgspec.structs.replace(step, diff=step.diff | others))
        last = msgspec.structs.replace(self.last, diff=self.last.diff | dict(files))
        return Solution(last=last, earlier=tuple(earlier))

    def repaired(self, task: Task) -> dict[str, bytes]:
        """The files whose content is new; in an image the task's own files are changes as well."""
        before = self.before(task)
        return {path: data for path, data in self.last.diff.items() if before.get(path) != data}

    def before(self, task: Task) -> dict[str, bytes]:
        """The files that an attempt begins with, as far as they are read."""
        return self.last.originals | task.files


class AgentSandboxes:
    """Fresh sandboxes of a task, as its agent gets them."""

    def __init__(
        self, task: Task, oracle: Oracle, machines: Machines[Any], lease_s: float, run: str = "certify"
    ) -> None:
        self._run_name = run
        self._task, self._oracle, self._machines, self._lease_s = task, oracle, machines, lease_s
        self._group = f"c{task_hash(task, oracle)[:16]}-agent"
        self._count = 0
        self.plugins: dict[Plugin, None] = {}
        """Sandbox backends that come from outside of headrace."""

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, given back at the end. SandboxLost, NoCapacity after `TRIES` failures."""
        sandbox = await self._acquire()
        try:
            self.plugins.update(dict.fromkeys(sandbox.plugins))
            yield sandbox
        finally:
            self._machines.give_back(sandbox)

    async def _acquire(self) -> Any:
        task, failures = self._task, 0
        while True:
            self._count += 1
            request = Acquire(
                run=self._run_name,
                lane="eval",
                role="judge",  # of the judge's share of a node
                group=self._group,
                slot=self._count,
                attempt=0,
                isolation="episode",
                lease_s=self._lease_s,
                network=task.network,
            )
            try:
                return await self._machines.acquire(for_task(request, task))
            except Superseded:
                raise
            except (SandboxLost, NoCapacity):
                failures += 1
                if failures == TRIES:
                    raise
                await asyncio.sleep(RETRY_S * failures)

    async def known(self) -> Solution:
        """The known solution. NoSolution when it cannot be made or changes nothing; SandboxLost, NoCapacity."""
        task, oracle = self._task, self._oracle
        if not task.sandbox:
            return Solution(last=Snapshot(diff={ANSWER: oracle.answer.encode()}))
        if not task.image and not oracle.script and not oracle.steps:
            changes = oracle.solution_entries or ()
            return Solution(last=Snapshot(diff=oracle.solution, deleted=oracle.removed, changes=changes))
        deaths = 0
        while True:
            try:
                async with self.sandbox() as sandbox:
                    solution = await self._made(sandbox)
                break
            except (NodeSilent, Superseded):
                raise
            except _Died as error:
                deaths += 1
                if deaths == DEATHS:
                    raise NoSolution(f"{DEATHS} sandboxes ended while the known solution was made: {error}") from None
        if not self._changed(solution.last):
            outside = ", ".join(solution.last.touched[:SHOWN])
            if outside:
                raise NoSolution(f"the known solution changes no path that the task allows, but {outside}")
            raise NoSolution("the known solution changes nothing")
        return solution

    async def _made(self, sandbox: Sandbox) -> Solution:
        try:
            await self._write(sandbox)
            if self._oracle.steps:
                return await self._stepwise(sandbox, self._oracle.steps.tests)
            await self._run(sandbox, self._oracle.script, self._oracle.tests.timeout_s)
            return Solution(last=await self._pulled(sandbox, "solution"))
        except (NodeSilent, Superseded):
            raise
        except SandboxLost as error:
            raise _Died(str(error)) from None

    async def _write(self, sandbox: Sandbox) -> None:
        oracle = self._oracle
        await self._put(sandbox, oracle.solution, oracle.solution_entries or (), oracle.removed)

    async def _put(
        self, sandbox: Sandbox, files: Mapping[str, bytes], entries: Sequence[Change], removed: Sequence[str] = ()
    ) -> None:
        if files or removed or entries:
            written = await write(sandbox, files, entries, delete=removed)
            if not written.ok:
                raise NoSolution(f"the known solution cannot be written: {written.error}")

    async def _stepwise(self, sandbox: Sandbox, steps: Sequence[StepTests]) -> Solution:
        """The solutions of a task's steps, one after the other."""
        earlier: list[Snapshot] = []
        for number, step in enumerate(steps):
            if number:
                await begin_step(sandbox, self._task, number, "solution")
            await self._put(sandbox, step.solution or {}, step.solution_entries or ())
            await self._run(sandbox, step.script, step.tests.timeout_s)
            earlier.append(await self._pulled(sandbox, f"solution{number}"))
        return Solution(last=earlier.pop(), earlier=tuple(earlier))

    async def _run(self, sandbox: Sandbox, script: str, tests_s: float) -> None:
        """Run the solution's program from a file, because one argument of a program has at most 128 KiB. tests_s: its
        time limit where the task has none."""
        if not script:
            return
        limit = self._task.sandbox_limits.time_s or tests_s
        written = await sandbox.call(WriteFiles(files={PROGRAM: script.encode()}))
        if not written.ok:
            raise NoSolution(f"the solution's program cannot be written: {written.error}")
        done = await sandbox.call(Exec(argv=(*interpreter(script), PROGRAM), timeout_s=limit))
        await sandbox.call(WriteFiles(files={}, delete=(HOST_FOLDER.rstrip("/"),)))
        if done.ended:
            raise _Died(done.error)
        if done.timed_out:
            raise _failed(f"the solution's program does not end within {limit:g} s", done)
        if done.code or not done.ok:
            raise _failed(f"the solution's program ends with code {done.code}: {_last_line(done)}", done)

    async def _pulled(self, sandbox: Sandbox, call_id: str) -> Snapshot:
        """The changes of a sandbox, as a rollout pulls them."""
        try:
            pulled = await pull(sandbox, self._task, call_id, _ORIGINALS)
        except TreeTooLarge as error:
            raise NoSolution(f"the known solution's changes cannot be read: {error}") from None
        if pulled.over:
            raise NoSolution(f"the known solution's files have more than {PULL_LIMIT >> 20} MiB")
        return pulled.changes

    def _changed(self, changes: Snapshot) -> bool:
        """Whether there is any change besides the task's own files, which an image gets with its sandbox."""
        if not self._task.image:
            return bool(changes.diff or changes.deleted or changes.changes)
        pushed = self._task.files
        entries = self._task.entries or ()
        modes = dict.fromkeys(pushed, 0o644) | {entry.path: entry.mode for entry in entries}
        folders = {path[:at] for path in pushed for at, char in enumerate(path) if char == "/"}
        for change in changes.changes:
            if change.kind == "file":
                same = pushed.get(change.path) == changes.diff[change.path] and change.mode == modes[change.path]
            else:
                same = change in entries or (change.kind == "folder" and change.path in folders)
            if not same:
                return True
        return False


class _Died(Exception):
    """The sandbox ended while the known solution was made in it."""


def _failed(text: str, done: OpResult) -> NoSolution:
    error = NoSolution(text)
    error.output = tail(done)
    return error


def _last_line(done: OpResult) -> str:
    lines = [line for text in (done.stderr, done.stdout) for line in text.strip().splitlines()[-1:]]
    return plain(lines[0][:200]) if lines else "no output"
