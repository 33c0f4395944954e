"""A task's sandbox: the request that attempt, judge, replay and certificate share, and the files of later steps."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.messages.sandbox import Acquire, ApplyChanges, OpResult, Sandbox, WriteFiles
from headrace.messages.tasks import Change, Task
from headrace.vmhost.guest.names import of_key


def for_task(
    request: Acquire, task: Task, files: Mapping[str, bytes] | None = None, entries: Sequence[Change] = ()
) -> Acquire:
    """The request with the task's machine, folder and limits. files, entries: in place of the task's own."""
    if files is None:
        files, entries = task.files, task.entries or ()
    return msgspec.structs.replace(
        request,
        template=task.machine,
        workdir=task.repository,
        limits=task.sandbox_limits,
        requires=("upper_diff",) if task.image else (),
        files=dict(files),
        entries=tuple(entries),
    )


async def write(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    entries: Iterable[Change],
    call_id: str = "",
    delete: Iterable[str] = (),
    forced: bool = False,
) -> OpResult:
    """Write files of a task, and make their links, folders and modes. All paths are keys on the host. forced: as in
    `WriteFiles`. Returns the first result that is not ok. SandboxLost."""
    made = tuple(msgspec.structs.replace(entry, path=of_key(entry.path)) for entry in entries)
    written = {of_key(path): data for path, data in files.items()}
    placed = {entry.path for entry in made}  # in place of whatever is there, such as a link
    plain = {path: data for path, data in written.items() if path not in placed}
    done = await sandbox.call(WriteFiles(files=plain, delete=tuple(map(of_key, delete)), forced=forced), call_id)
    if made and done.ok:
        done = await sandbox.call(
            ApplyChanges(changes=made, files=written, forced=forced), call_id and f"{call_id}-entries"
        )
    return done


async def begin_step(sandbox: Sandbox, task: Task, ended: int, trajectory: str) -> None:
    """Write the files of the step that follows the first `ended` ones. SandboxLost.

    A file whose path the agent made a folder is not written: that is the attempt's own work.
    """
    step = task.later[ended - 1]
    if step.files or step.entries:
        await write(sandbox, step.files, step.entries or (), f"{trajectory}-step{ended}-files")
