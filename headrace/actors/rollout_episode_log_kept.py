"""The sandbox of an attempt as bytes beside its turn log, and going on in a copy of it.

The idea: the turn log says what the policy saw and did, but a sandbox holds more than calls would make again: a server
that was started, a cache that took an hour, the state of a process. Every few turns the node is asked for the sandbox's
pages and devices (vmhost/snapshot.py), while the policy samples its next turn; they become a record between two turns,
under the same expected sequence, so a zombie's are refused like its turns.

Why so: a copy is made only when the sandbox itself is gone. Calls that were answered after the record are sent again
and must say the same again (but for times and addresses): a copy that remembers something else than the log is lost.

Trade-off: it takes a machine of its own (isolation = episode) and a few MiB of HR_BLOB each time, so it is off unless
[rollout] checkpoint_every asks for it; never on the production lane, where a copy would hold a user's files beyond
their purge.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.actors.rollout_episode_log import Past, TurnLog
from headrace.actors.sandbox_client import CannotKeep, RemoteSandbox, Sandboxes, Superseded
from headrace.messages.rollout import RolloutRequest, ToolCall, ToolResult, Turn
from headrace.messages.sandbox import Acquire, SandboxLost
from headrace.replay.calls import same

LARGEST = 7 << 20
"""Bytes of a checkpoint that is kept: to be restored it must fit one message."""
COPIES = 3
"""Copies of one attempt before it is given up: what kills a machine might do it again."""

Report = Callable[..., Awaitable[None]]
Runner = Callable[[ToolCall], Awaitable[ToolResult]]


class Keeping(NamedTuple):
    """When a sandbox is kept, and who is told when it can't be."""

    every: int
    """Turns from one checkpoint to the next; 0 keeps none."""
    report: Report

    def due(self, turn: Turn, request: RolloutRequest) -> bool:
        """Whether to keep the sandbox behind this turn; the last one leaves nothing to go on with."""
        last = any(call.name == "finish" and not call.error for call in turn.calls)
        apart = request.lane != "production" and request.isolation == "episode"
        return apart and self.every > 0 and not last and (turn.index + 1) % self.every == 0

    async def keep(self, sandbox: RemoteSandbox, log: TurnLog, index: int, trajectory: str) -> None:
        """Write the sandbox as it is after turn `index`. WrongSequence: another goes on with the attempt."""
        try:
            data = await sandbox.checkpoint()
            if len(data) > LARGEST:
                raise CannotKeep(f"{len(data) >> 20} MiB are too much for one message")
        except (CannotKeep, SandboxLost) as error:
            await self.report("checkpoint_failed", str(error), "warning", trajectory=trajectory, turn=index)
            return
        await log.kept(index, sandbox.node, data)


async def bring_back(sandboxes: Sandboxes, acquire: Acquire, past: Past, patience_s: float) -> RemoteSandbox:
    """A copy of the sandbox that held the work so far, as it was kept. SandboxLost, NoRoom."""
    assert past.kept is not None
    try:
        place = await sandboxes.acquire(acquire, node=past.kept.node, patience_s=patience_s)
    except Superseded:
        raise
    except SandboxLost:  # that node is gone
        place = await sandboxes.acquire(acquire, patience_s=patience_s)
    # An attempt has one sandbox: the copy takes the place of the new one.
    await sandboxes.release(place)
    try:
        return await sandboxes.restore(acquire, past.kept.data, place.node, patience_s)
    except CannotKeep as error:
        raise SandboxLost(f"{place.node} can't bring {past.sandbox} back: {error}") from None


async def catch_up(past: Past, run: Runner) -> None:
    """Send a copy what was answered since it was kept. SandboxLost when it answers otherwise."""
    assert past.kept is not None
    since: Sequence[Turn] = past.turns[past.kept.turn + 1 :]
    for turn in since:
        for call, recorded in zip(turn.calls, turn.results, strict=False):  # an open turn's calls are yet to be sent
            again = await run(call)
            if not same(recorded, again):
                raise SandboxLost(f"call {call.id} was answered otherwise by a copy of {past.sandbox}")
