"""Runs a candidate through the gate's stages: requests its benchmark, counts ratings, publishes verdicts, promotes.

`ledger.gate` decides; this module reads and writes. The state is a value in HR_PRODUCT by which gateways route. A
verdict is published before its state is stored, so after a crash in between it is published again under the same
message id.
"""

import time
from collections.abc import Awaitable, Callable
from statistics import fmean

import msgspec

from headrace.bench.requests import requests, shares, trial_id
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.ledger import gate
from headrace.ledger.gate import RUNNING, Move
from headrace.ledger.requests import settings_of
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product import GateState, Promotion, ShadowTurn, Stage, gate_key, promotion_key
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT, token

EVALUATION = "gate-"
"""Prefix of the ids of the gate's evaluations."""
Tell = Callable[..., Awaitable[int]]
"""`Actor.publish_event`."""


def evaluation_id(policy: PolicyRef, tasks: int) -> str:
    """The id of a version's evaluation, which all comparisons of this version use."""
    return f"{EVALUATION}{token(policy.run) if policy.run else 'own'}-v{policy.version}-n{tasks}"


class Candidates:
    """The gate of one run."""

    def __init__(self, bus: Bus, config: Config, run: str, tell: Tell) -> None:
        self._bus, self._config, self._run, self._tell = bus, config, run, tell
        self.rules = config.gate
        self.state = GateState(run=run)
        self.promoted: Promotion | None = None
        self._results: dict[str, EvalResult] = {}

    async def recover(self) -> None:
        """Read the promoted version and the state of the gate, and request missing evaluations."""
        self._values = await self._bus.kv("HR_PRODUCT")
        stored = await self._values.get(promotion_key(self._run))
        self.promoted = stored[0] if stored is not None and isinstance(stored[0], Promotion) else None
        entry = await self._values.get(gate_key(self._run))
        if entry is not None and isinstance(entry[0], GateState):
            self.state = entry[0]
        # A predecessor may have been killed after the promotion and before it stored the state.
        if self.running and self.promoted is not None and self.promoted.policy == self.state.candidate:
            await self._take(gate.ended(self.state, "promoted", "promoted before a restart", time.time()))
        if self.state.stage == "benchmark":
            await self._ask()

    @property
    def running(self) -> bool:
        """Whether a candidate has no verdict yet."""
        return self.state.stage in RUNNING

    async def begin(self, candidate: PolicyRef, seen_seq: int) -> None:
        """Begin the gate for a candidate; expects a promoted version. seen_seq: as in `gate.begin`."""
        assert self.promoted is not None
        await self._take(gate.begin(self._run, candidate, self.promoted.policy, self.rules, time.time(), seen_seq))
        if self.state.stage == "benchmark":
            await self._ask()

    async def _ask(self) -> None:
        """Request the evaluations of both versions. The broker drops a request that was published before."""
        settings = settings_of(self._config, temperature=1.0)
        for policy in (self.state.candidate, self.state.promoted):
            first = EvalRequest(
                id=evaluation_id(policy, self.rules.tasks),
                run=self._run,
                suite=self._config.tasks.heldout,
                tasks=self.rules.tasks,
                policy=policy,
                sampling=settings.sampling,
                limits=settings.limits,
                isolation=settings.isolation,
                reason="gate",
            )
            for request in requests(first, self.rules.trials):
                if request.id not in self._results:
                    await self._tell(request, msg_id=f"{self._run}.{request.id}")
        await self._compare()

    async def on_result(self, result: EvalResult) -> None:
        """Record the result of one of the gate's evaluations; it may be from before a restart."""
        if result.id.startswith(EVALUATION):
            self._results[result.id] = result
            await self._compare()

    async def _compare(self) -> None:
        if self.state.stage != "benchmark":
            return
        candidate, promoted = self._measured(self.state.candidate), self._measured(self.state.promoted)
        if candidate and promoted:
            move = gate.measured(self.state, shares(candidate), shares(promoted), self.rules, time.time())
            if move is not None:
                await self._take(move)

    def _measured(self, policy: PolicyRef) -> list[EvalResult]:
        """The results of all trials of a version; empty while any result is missing."""
        id = evaluation_id(policy, self.rules.tasks)
        ids = [trial_id(id, trial) for trial in range(self.rules.trials)]
        return [self._results[each] for each in ids] if all(each in self._results for each in ids) else []

    async def on_shadow(self, turn: ShadowTurn) -> None:
        """Count a shadow turn, which the candidate answered without showing it to the user."""
        if turn.policy == self.state.candidate:
            await self._apply(gate.shadowed(self.state, turn.ok, self.rules, time.time()))

    async def on_rating(self, policy: PolicyRef, up: bool, seq: int, began: float) -> None:
        """Count a user's rating of a session of `policy` that began at `began`, in seconds since the epoch."""
        await self._apply(gate.rated(self.state, policy, up, seq, self.rules, time.time(), began))

    async def on_time(self) -> None:
        """End the gate with the verdict `held` for a candidate whose stage takes longer than `stage_s`."""
        move = gate.overdue(self.state, time.time())
        if move is not None:
            await self._take(move)

    async def decide(self, promotion: Promotion, stage: Stage) -> None:
        """Apply an operator's promotion. stage: the end of the present candidate, if there is one."""
        if self.running:
            await self._take(gate.ended(self.state, stage, f"an operator: {promotion.reason}", time.time()), promotion)
        else:
            await self._promote(promotion)

    async def _apply(self, after: Move | GateState) -> None:
        if isinstance(after, Move):
            await self._take(after)
        elif after != self.state:
            self.state = after
            await self._values.put(gate_key(self._run), after)

    async def _take(self, move: Move, promotion: Promotion | None = None) -> None:
        """Publish a verdict, promote if the stage is `promoted`, then store the state."""
        state, verdict = move
        name = f"{verdict.candidate.run}.{verdict.candidate.version}.{verdict.stage}.{state.step}"
        await self._tell(verdict, msg_id=f"{self._run}.gate.{name}")
        if promotion is None and state.stage == "promoted":
            measured = [self._measured(each) for each in (state.candidate, state.promoted)]
            rates = [fmean(result.rate for result in results) if results else 0.0 for results in measured]
            promotion = Promotion(
                run=self._run,
                version=state.candidate.version,
                branch=state.candidate.run,
                eval_id=evaluation_id(state.candidate, self.rules.tasks) if self.rules.tasks else "",
                rate=rates[0],
                previous_rate=rates[1],
                reason=f"gate passed: {verdict.reason}",
            )
        if promotion is not None:
            await self._promote(promotion)
        self.state = state
        await self._values.put(gate_key(self._run), state)

    async def _promote(self, promotion: Promotion) -> None:
        """Store the promotion, from which gateways read the version, and publish it, so that receivers keep the
        version."""
        await self._values.put(promotion_key(self._run), promotion)
        self.promoted = promotion
        await self._tell(promotion)
        if promotion.branch:
            subject = EVENT.at(run=token(promotion.branch), actor="feedback", type=Promotion.type_name)
            await self._bus.publish(subject, msgspec.structs.replace(promotion, run=promotion.branch, branch=""))
