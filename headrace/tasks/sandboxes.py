"""A task's sandbox: the request that attempt, judge, replay and certificate share, and the files of later steps."""

from collections.abc import Mapping

import msgspec

from headrace.messages.sandbox import Acquire, Sandbox, WriteFiles
from headrace.messages.tasks import Task
from headrace.vmhost.guest.names import of_key


def for_task(request: Acquire, task: Task, files: Mapping[str, bytes] | None = None) -> Acquire:
    """The request with the task's machine, folder and limits. files: in place of the task's own."""
    return msgspec.structs.replace(
        request,
        template=task.machine,
        workdir=task.repository,
        limits=task.sandbox_limits,
        requires=("upper_diff",) if task.image else (),
        files=task.files if files is None else dict(files),
    )


async def begin_step(sandbox: Sandbox, task: Task, ended: int, trajectory: str) -> None:
    """Write the files of the step that follows the first `ended` ones. SandboxLost.

    A file whose path the agent made a folder is not written: that is the attempt's own work.
    """
    if files := task.later[ended - 1].files:
        written = {of_key(path): data for path, data in files.items()}
        await sandbox.call(WriteFiles(files=written), f"{trajectory}-step{ended}-files")
