"""Checkpoints of an attempt's sandbox in its turn log, and resumption in a copy of the sandbox.

The idea: the turn log records what the policy saw and did, but replaying the calls cannot restore everything in a
sandbox, such as a server that was started, a cache that took an hour, or the memory of a process. Every few turns the
node copies the sandbox's pages and devices (vmhost/qemu/snapshot.py) while the policy samples its next turn. The copy
becomes a record between two turns, under the same expected sequence, so that a stale actor's checkpoint is refused like
its turns.

Why: a copy is started only when the sandbox itself is lost. Calls that were answered after the checkpoint are sent
again and must give the same answers (except for times and addresses); otherwise the copy is discarded.

Trade-off: a checkpoint needs a machine of its own (isolation = episode) and a few MiB of HR_BLOB each time, so it is
off unless [rollout] checkpoint_every is set. It is never made on the production lane, where a copy would keep a user's
files after their purge.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.messages.rollout import RolloutRequest, ToolCall, ToolResult, Turn
from headrace.messages.sandbox import Acquire, SandboxLost
from headrace.replay.calls import same
from headrace.sandboxes.client import CannotCopy, RemoteSandbox, Sandboxes, Superseded

MAX_BYTES = 7 << 20
"""Largest number of bytes of a stored checkpoint: to restore it, it must fit into one message."""
MAX_COPIES = 3
"""Largest number of copies of one attempt: its own calls may end the machine, so copies must not repeat without end."""

Report = Callable[..., Awaitable[None]]
Runner = Callable[[ToolCall], Awaitable[ToolResult]]


class CheckpointSchedule(NamedTuple):
    """Decides when a checkpoint is written, writes it, and reports failures."""

    every: int
    """Number of turns between two checkpoints; 0: no checkpoints."""
    report: Report

    def due(self, turn: Turn, request: RolloutRequest) -> bool:
        """Whether to write a checkpoint after this turn. The last turn needs none, and the turn that ends a step is
        replayed."""
        own_machine = request.lane != "production" and request.isolation == "episode"
        return own_machine and self.every > 0 and not turn.finishes and (turn.index + 1) % self.every == 0

    async def write(self, sandbox: RemoteSandbox, log: TurnLog, index: int, trajectory: str) -> None:
        """Store the sandbox after turn `index`. WrongSequence when another actor has taken over the attempt."""
        try:
            data = await sandbox.checkpoint()
            if len(data) > MAX_BYTES:
                raise CannotCopy(f"the checkpoint has {len(data) >> 20} MiB; one message holds {MAX_BYTES >> 20} MiB")
        except (CannotCopy, SandboxLost) as error:
            await self.report("checkpoint_failed", str(error), "warning", trajectory=trajectory, turn=index)
            return
        await log.checkpoint(index, sandbox.node, data)


async def restore(sandboxes: Sandboxes, acquire: Acquire, resume: ResumeState, patience_s: float) -> RemoteSandbox:
    """A copy of the attempt's sandbox from its newest checkpoint. SandboxLost, NoCapacity."""
    assert resume.checkpoint is not None
    try:
        acquired = await sandboxes.acquire(acquire, node=resume.checkpoint.node, patience_s=patience_s)
    except Superseded:
        raise
    except SandboxLost:  # that node is gone: try any other
        acquired = await sandboxes.acquire(acquire, patience_s=patience_s)
    # An attempt has one sandbox: the copy replaces the one that was just acquired.
    await sandboxes.release(acquired)
    try:
        return await sandboxes.restore(acquire, resume.checkpoint.data, acquired.node, patience_s)
    except CannotCopy as error:
        raise SandboxLost(f"{acquired.node} cannot restore a checkpoint of {resume.sandbox}: {error}") from None


async def replay_calls(
    resume: ResumeState, run: Runner, external: Callable[[ToolCall], bool], answered: Callable[[Turn], Awaitable[None]]
) -> None:
    """Run the calls that were answered after the checkpoint again in a copy. Calls to MCP servers are left out, because
    they do not change the sandbox. answered: awaited after the calls of each turn. SandboxLost when an answer differs
    from the recorded one."""
    assert resume.checkpoint is not None
    turns: Sequence[Turn] = resume.turns[resume.checkpoint.turn + 1 :]
    for turn in turns:
        for call, recorded in zip(turn.calls, turn.results, strict=False):  # an open turn has no results yet
            if external(call):
                continue
            result = await run(call)
            if not same(recorded, result):
                raise SandboxLost(f"a copy of {resume.sandbox} gave another answer to call {call.id} than recorded")
        if turn.results:
            await answered(turn)
