"""Deletes a user's data, keeps the user out of later batches and certifies it.

A purge has four parts. The deny-list comes first, so that gateways drop what they hold of the user. Requests under way
are cancelled. The record that keeps the ledger of feedback balanced is written. Then passes over all streams delete the
user's records until a pass finds none; the signed statement lists them.

Records that were on their way meanwhile are deleted by further passes for `LATE_S`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from headrace.actors.feedback.branch import BranchLedger
from headrace.actors.feedback.certificate import Signer
from headrace.actors.feedback.erasing import Eraser
from headrace.bus.connection import Bus
from headrace.gateway.tenants.store import KeysRefused, secret
from headrace.ledger.feedback import FeedbackBook
from headrace.ledger.state import RunState
from headrace.messages.base import Message
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import Ack, Heartbeat
from headrace.messages.product import (
    PURGE_SECRET,
    AttemptControl,
    DeniedUser,
    FeedbackPurged,
    PurgeCertificate,
    PurgedFeedback,
    PurgeStatement,
    PurgeUser,
    ReadmitUser,
    UserDropped,
    certificate_key,
    denied_key,
)
from headrace.messages.rollout import SlotFailed
from headrace.messages.subjects import FAIL, FATE, LEDGER, RPC, TRAJ, token
from headrace.messages.training import StepDone

PURGED = "purged"
"""Takes a user's place in the subject of purge records, so that a purge does not delete them."""
CANCEL_S = 10.0
"""How long a purge waits for rollout actors to end the user's attempts; after that it ends them in the ledger."""
REPEAT_S = 0.5
PASSES = 20
"""Passes over the streams before a purge gives up because records keep coming."""
LATE_S = 600.0
KEPT = (
    "HR_LEDGER and closings in HR_SCORE: names of sessions (the hash and a number), seeds, rewards and reasons",
    "HR_FEEDBACK: sequences of the deleted ratings and the groups in which they were trained",
    "HR_PRODUCT: the hash on the deny-list, and this certificate",
    "versions that were trained on purged ratings (absorbed_steps)",
    "outside of the run: backups, webhooks that were sent, logs of processes, caches in the memory of engines",
)
"""Descriptions of the data that stays after a purge."""
ELSEWHERE = (
    "objects: full snapshots of weights alone",
    "folders: [bus] blob_dir holds no payload of a user; caches of images, rubrics and search hold suites' tasks alone",
    "environments: sandboxes end with their attempts, or when their lease lapses",
    "regions: weights alone are mirrored",
)
HOLDERS = ("gateway", "rollout")
"""Roles that hold users' sessions in memory."""


class Purges:
    """The purges and the deny-list of one run."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        folder: Path,
        book: FeedbackBook,
        branch: BranchLedger,
        trained: RunState,
        lock: asyncio.Lock,
        event: Callable[..., Awaitable[None]],
    ) -> None:
        """trained: the branch's state, or the run's where it trains on sessions itself. folder: of the run, for the
        public key. lock: held while the ledger of feedback changes."""
        self._bus, self._run, self._book, self._branch = bus, run, book, branch
        self._trained = trained
        self._folder, self._lock, self._event = folder, lock, event
        self.denied: set[str] = set()
        """Users who are never trained on."""
        self._late: dict[str, tuple[Eraser, float]] = {}
        self._dropped: dict[str, set[str]] = {}
        """User under purge to the actors that dropped the user."""

    async def recover(self) -> None:
        """Read the deny-list."""
        values = await self._bus.kv("HR_PRODUCT")
        entries = (await values.items(denied_key(self._run, "*"))).values()
        self.denied = {entry.user for entry, _ in entries if isinstance(entry, DeniedUser) and not entry.readmitted}

    async def answer(self, message: Message) -> PurgeCertificate | Ack:
        """Answer a PurgeUser or a ReadmitUser."""
        if not isinstance(message, PurgeUser | ReadmitUser) or not message.user.isalnum():
            return Ack(ok=False, detail="expected a PurgeUser or ReadmitUser with one user hash of letters and digits")
        return await (self.purge if isinstance(message, PurgeUser) else self.readmit)(message.user)

    async def dropped(self, message: Message) -> None:
        """Take up that an actor has dropped a user."""
        if isinstance(message, UserDropped) and message.user in self._dropped:
            self._dropped[message.user].add(message.actor)

    async def _holders(self) -> dict[str, str]:
        """The live actors that may hold a user: ``<role>.<id>`` to the node."""
        presence = await self._bus.kv("HR_PRESENCE")
        return {
            name: beat.node
            for role in HOLDERS
            for name, (beat, _) in (await presence.items(f"{role}.>")).items()
            if isinstance(beat, Heartbeat) and beat.run in ("", self._run) and beat.state != "stopped"
        }

    async def readmit(self, user: str) -> Ack:
        """Take a user off the deny-list: later sessions are trained on as far as their tenant allows it."""
        values = await self._bus.kv("HR_PRODUCT")
        denied = await values.get(denied_key(self._run, user))
        if denied is None or not isinstance(denied[0], DeniedUser) or denied[0].readmitted:
            return Ack(ok=False, detail="this user is not on the deny-list")
        if user in self._late:
            left = self._late[user][1] - time.monotonic()
            text = f"the user's purge deletes late records for another {left:.0f} s: ask again after that"
            return Ack(ok=False, detail=text)
        await values.put(denied_key(self._run, user), msgspec.structs.replace(denied[0], readmitted=time.time()))
        self.denied.discard(user)
        await self._event("user_readmitted", f"denied since {denied[0].since:.0f} (seconds since the epoch)")
        return Ack(detail="the user is off the deny-list; what was purged stays purged")

    async def purge(self, user: str) -> PurgeCertificate | Ack:
        """Purge a user. An Ack says why there is no certificate."""
        asked = time.time()
        dropped = self._dropped[user] = set()
        try:
            signer = Signer(await secret(self._bus, PURGE_SECRET), self._folder)
        except KeysRefused as error:  # nothing is deleted without a certificate
            return Ack(ok=False, detail=str(error))
        values = await self._bus.kv("HR_PRODUCT")
        await values.put(denied_key(self._run, user), DeniedUser(run=self._run, user=user, since=asked))
        self.denied.add(user)
        eraser = Eraser(self._bus, self._run, user)
        holders = await self._holders()
        ended = await self._end_requests(user, eraser, dropped, set(holders))
        async with self._lock:
            record = await self._record(user)
        removed = 0
        for _ in range(PASSES):
            erased = await eraser.erase()
            removed += erased
            if not erased:
                break
        else:
            return Ack(ok=False, detail=f"records of the user still came after {PASSES} passes: ask again")
        self._late[user] = eraser, time.monotonic() + LATE_S
        statement = PurgeStatement(
            run=self._run,
            user=user,
            branch=self._trained.run,
            asked=asked,
            ended=time.time(),
            records=eraser.records(),
            ended_requests=ended,
            ratings=len(record.ratings),
            last_version_before=record.last_version_before,
            absorbed_steps=self._absorbed_steps(user),
            pending_groups=self._pending_groups(user),
            denied=True,
            kept=KEPT,
            elsewhere=ELSEWHERE,
            reached=tuple(f"{name} on {node}" for name, node in sorted(holders.items()) if name in dropped),
            unreached=tuple(f"{name} on {node}" for name, node in sorted(holders.items()) if name not in dropped),
        )
        detail = f"{removed} messages removed{_absorbed(record)}"
        if statement.unreached:
            detail += f"; not reached: {', '.join(statement.unreached)}"
        certificate = signer.certificate(statement, detail)
        await values.put(certificate_key(self._run, user), certificate)
        text = f"{removed} messages, {len(record.ratings)} ratings"
        await self._event("user_purged", text, messages=removed, ratings=len(record.ratings))
        return certificate

    async def sweep(self) -> None:
        """Delete records that were on their way during a purge."""
        for user, (eraser, until) in [*self._late.items()]:
            removed = await eraser.erase()
            if removed:
                text = f"{removed} messages of a purged user came after its certificate and are deleted"
                await self._event("purged_late", text, "warning", messages=removed)
            if time.monotonic() > until:
                del self._late[user]

    async def _end_requests(self, user: str, eraser: Eraser, dropped: set[str], holders: set[str]) -> tuple[str, ...]:
        """Cancel the user's requests under way; the groups of those that had not ended. Returns when the holders have
        dropped the user too, or after `CANCEL_S`."""
        where = RPC.at(service="rollout", caller="feedback", method=f"control-{token(self._run)}")
        deadline, open_groups = time.monotonic() + CANCEL_S, await self._open_groups(user)
        groups = tuple(sorted(open_groups))
        while True:
            await self._bus.emit(where, AttemptControl(run=self._run, user=user))
            await asyncio.sleep(REPEAT_S)  # also without open sessions: gateways drop what they hold meanwhile
            late, taken = time.monotonic() > deadline, await eraser.taken()
            for stored, attempt in await eraser.queued():
                # A rollout actor that took a request ends it itself, unless it is gone.
                if (late or stored.seq > taken) and await eraser.drop_queued(stored) and attempt is not None:
                    if attempt.group in open_groups:
                        await self._fail(open_groups[attempt.group])
            open_groups = await self._open_groups(user)
            if late or (not open_groups and holders <= dropped):
                return groups

    async def _open_groups(self, user: str) -> dict[str, SlotIssued]:
        """The newest attempt of each of the user's sessions that has no end in the ledger."""
        newest: dict[str, SlotIssued] = {}
        failed: set[tuple[str, int]] = set()
        filters = (LEDGER.where(run=self._run, group=f"{user}.*"), FAIL.where(run=self._run, group=f"{user}.*"))
        async for received in self._bus.history("HR_LEDGER", *filters):
            if isinstance(received.message, SlotIssued):
                newest[received.message.group] = received.message
            elif isinstance(received.message, SlotFailed):
                failed.add((received.message.group, received.message.attempt))
        finished = set()
        for subject in await self._bus.subjects("HR_TRAJ", TRAJ.where(run=self._run, group=f"{user}.*")):
            finished.add(".".join(subject.split(".")[-2:]))
        return {
            group: issued
            for group, issued in newest.items()
            if issued.lane == "production" and (group, issued.attempt) not in failed and group not in finished
        }

    async def _fail(self, issued: SlotIssued) -> None:
        """End an attempt in the ledger that no rollout actor will take."""
        failed = SlotFailed(
            run=self._run,
            lane="production",
            group=issued.group,
            slot=issued.slot,
            attempt=issued.attempt,
            reason="cancelled",
            detail="its user's data was purged",
        )
        trajectory = f"{issued.group}-{issued.slot}-{issued.attempt}"
        subject = FAIL.at(run=self._run, group=issued.group)
        await self._bus.publish(subject, failed, msg_id=f"{self._run}.{trajectory}.cancelled")

    async def _record(self, user: str) -> FeedbackPurged:
        """Write the record of the user's ratings, so that the ledger balances without them."""
        book, branch = self._book, self._branch
        ratings = tuple(
            PurgedFeedback(rating.seq, rating.group if rating.fate == "closed" else "") for rating in book.of_user(user)
        )
        record = FeedbackPurged(
            run=self._run,
            user=user,
            ratings=ratings,
            branch=self._trained.run,
            last_version_before=min(self._absorbed_steps(user), default=-1),
        )
        # A group that was issued and not closed would otherwise stay open.
        for group in [name for name in branch.state.open if name.startswith(f"{user}.")]:
            await branch.give_up(group, PURGED)
        seq = await self._bus.publish(FATE.at(run=self._run, user=PURGED), record)
        book.apply(record, seq, (await self._bus.get("HR_FEEDBACK", seq)).time)
        return record

    def _groups(self, user: str) -> set[str]:
        """Groups of the user's ratings in the branch, also of those that an earlier purge deleted."""
        return {rating.group for rating in self._book.ratings.values() if rating.group.startswith(f"{user}.")}

    def _absorbed_steps(self, user: str) -> tuple[int, ...]:
        """The branch's steps that trained on the user's ratings. Step n made version n + 1, so the first of them is
        also the last version before."""
        groups, outcomes = self._groups(user), self._trained.outcomes.values()
        return tuple(sorted(each.step for each in outcomes if isinstance(each, StepDone) and groups & set(each.groups)))

    def _pending_groups(self, user: str) -> tuple[str, ...]:
        """The user's groups in batches that have no outcome yet."""
        named = [self._trained.groups.get(group) for group in sorted(self._groups(user))]
        return tuple(group.name for group in named if group is not None and not group.steps)


def _absorbed(record: FeedbackPurged) -> str:
    """A text about the versions that were trained on purged ratings; empty without any."""
    if record.last_version_before < 0:
        return ""
    return (
        f"; versions of {record.branch} after {record.last_version_before} were trained on some of them and are not "
        "changed by the purge"
    )
