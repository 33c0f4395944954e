"""Runs the product's commands in a separate sandbox: prepares a workspace and forks it, or tests an agent's work.

The gateway is exposed to users, so its role has no access to sandboxes; it sends commands to a rollout actor of the
production lane. A fork is acquired under the key of its agent's first attempt and held until then, so that the attempt
continues in the fork on any rollout actor, like in any other sandbox.
"""

import asyncio
from collections.abc import Callable

import msgspec

from headrace.actors.rollout.episode import CAPACITY_WAIT_S
from headrace.messages.product import WorkspaceCommand, WorkspaceReport
from headrace.messages.sandbox import Acquire, Exec, NoCapacity, OpResult, PullChanges, PullTree, SandboxLost
from headrace.messages.tasks import Task, TaskRef
from headrace.sandboxes.client import CannotCopy, RemoteSandbox, Sandboxes
from headrace.tasks import UnknownSuite
from headrace.tasks.diff import PULL_LIMIT
from headrace.tasks.sandboxes import for_task
from headrace.tasks.workspace import LIGHT, WORKSPACE
from headrace.vmhost.guest.names import key

OUTPUT_CHARS = 4096
"""Largest number of characters of a command's output in the report; earlier output is cut."""


class WorkspaceCommands:
    """Runs WorkspaceCommands in this rollout actor's sandboxes."""

    def __init__(self, sandboxes: Sandboxes, lease_s: float, task: Callable[[TaskRef], Task]) -> None:
        """task: returns the task of a reference, or raises UnknownSuite."""
        self._sandboxes, self._lease_s, self._task = sandboxes, lease_s, task

    async def run(self, request: WorkspaceCommand) -> WorkspaceReport:
        """Run a command. The report has its exit code, output and copies, or in `failed` the reason why it did not
        run."""
        try:
            task = self._task(TaskRef(WORKSPACE, request.image or LIGHT))
            acquire = Acquire(
                run=request.run,
                lane="production",
                role="rollout",
                group=request.name,
                slot=0,
                attempt=0,
                isolation="episode",
                lease_s=self._lease_s,
            )
            acquire = for_task(acquire, task, request.files)
            sandbox = await self._sandboxes.acquire(acquire, patience_s=CAPACITY_WAIT_S)
        except (UnknownSuite, NoCapacity, SandboxLost) as error:
            return WorkspaceReport(failed=f"no sandbox: {error}")
        try:
            return await self._run_in(sandbox, acquire, request, task)
        except (NoCapacity, SandboxLost, CannotCopy) as error:
            return WorkspaceReport(failed=str(error))
        finally:
            self._sandboxes.give_back(sandbox)

    async def _run_in(
        self, sandbox: RemoteSandbox, acquire: Acquire, request: WorkspaceCommand, task: Task
    ) -> WorkspaceReport:
        done = OpResult()
        if request.command:
            done = await sandbox.call(Exec(argv=("sh", "-c", request.command), timeout_s=request.timeout_s))
        output = "\n".join(filter(None, (done.stdout, done.stderr, done.error if done.timed_out else "")))
        report = WorkspaceReport(code=done.code or int(not done.ok), output=output[-OUTPUT_CHARS:], node=sandbox.node)
        if not request.copies or report.code:
            return report
        tree = await sandbox.call(PullChanges(limit=PULL_LIMIT) if task.image else PullTree(limit=PULL_LIMIT))
        if not tree.ok or tree.truncated:
            return WorkspaceReport(failed=tree.error or f"the workspace holds more than {PULL_LIMIT >> 20} MiB")
        pulled = {key(path): data for path, data in tree.files.items()}
        files = request.files | pulled if task.image else pulled
        forks = await self._fork(sandbox, acquire, request) if "fork" in sandbox.capabilities else ()
        return msgspec.structs.replace(report, files=files, sandboxes=tuple(fork.id for fork in forks))

    async def _fork(
        self, sandbox: RemoteSandbox, acquire: Acquire, request: WorkspaceCommand
    ) -> tuple[RemoteSandbox, ...]:
        """Fork the sandbox once per copy and hold the forks, all of them or none. CannotCopy, NoCapacity,
        SandboxLost."""
        into = [msgspec.structs.replace(acquire, group=name, files={}) for name in request.copies]
        forks = await sandbox.fork(into)
        for name, fork in zip(request.copies, forks, strict=True):
            self._sandboxes.hold(fork, name, request.hold_s)
        if not all(await asyncio.gather(*(fork.renew() for fork in forks))):
            await asyncio.gather(*(self._sandboxes.release_held(name) for name in request.copies))
            raise SandboxLost(f"a fork of {sandbox.id} was lost at once")
        return tuple(forks)
