"""The events of a run as server-sent events, read from the turn log.

An event is one record of HR_TURN, and its id is the record's sequence. A client that lost its connection sends the last
id that it received and gets the later events, from any gateway and after any restart. The run's end is an event whose
id is the last record's id followed by ``-end``. The gateway stores nothing for a stream.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.gateway.agents.requests import AgentRefused
from headrace.gateway.agents.store import Agents
from headrace.gateway.dialects.base import event
from headrace.gateway.http import STREAM, send
from headrace.gateway.sessions import Run
from headrace.messages.product import Agent, AgentRun, ApiKey
from headrace.messages.rollout import TurnDone, TurnSampled

HEARTBEAT_S = 10.0
_ID = re.compile(r"([0-9]{1,18})(-end)?")


class Events:
    """Streams of runs."""

    def __init__(self, bus: Bus, agents: Agents, sessions: Mapping[str, Run]) -> None:
        self._bus, self._agents, self._sessions = bus, agents, sessions

    async def stream(self, request: web.Request, agent: Agent, run: AgentRun, key: ApiKey) -> web.StreamResponse:
        """Answer with the events after the request's Last-Event-ID. AgentRefused with 400 or 410; ConnectionResetError
        when the broker is lost during the answer."""
        filters = self._agents.filters(agent, run)
        after, ended = await self._after(request.headers.get("Last-Event-ID", ""), filters, run)
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        try:
            await send(response, event({"agent": agent.id, "run": run.id, "status": run.state}, "status"))
            session = self._sessions.get(self._agents.group(agent, run))
            while True:
                over = session is None or session.over  # read before the records: they are complete once a run is over
                changed = session.changed if session is not None else None
                async for received in self._bus.history("HR_TURN", *filters, start=after + 1):
                    after = received.seq
                    if isinstance(received.message, TurnSampled | TurnDone):
                        await send(response, turn_event(received.message, received.seq))
                if over or changed is None:
                    break
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    await send(response, b": heartbeat\n\n")
            try:
                run = await self._end(agent.id, run.id, key)
            except AgentRefused:
                run = msgspec.structs.replace(run, state="ERROR", detail="purged")
            if not ended:
                result = {"status": run.state, "detail": run.detail, "changed": run.changed, "restored": run.restored}
                await send(response, event(result, "result", f"{after}-end"))
            await send(response, event({}, "done"))
        except BusError as error:
            # The answer has begun. The client sees a closed connection and asks again with its last id.
            raise ConnectionResetError(f"the message bus is unavailable: {error}") from error
        await response.write_eof()
        return response

    async def _after(self, last: str, filters: list[str], run: AgentRun) -> tuple[int, bool]:
        """The sequence of the last event that the client received, and whether it received the result."""
        match = _ID.fullmatch(last)
        if last and match is None:
            raise AgentRefused(400, "invalid_last_event_id", "Last-Event-ID: expected the id of an event of this run")
        sequence, seen_end = (int(match[1]), bool(match[2])) if match is not None else (0, False)
        stored = [received.seq async for received in self._bus.history("HR_TURN", *filters)]
        if not stored and run.sandbox:
            raise AgentRefused(410, "stream_expired", "the events of this run are no longer stored")
        if sequence and sequence not in stored:
            if stored and sequence > stored[0]:
                text = "Last-Event-ID: expected the id of an event of this run"
                raise AgentRefused(400, "invalid_last_event_id", text)
            raise AgentRefused(410, "stream_expired", "events after this id are no longer stored")
        return sequence, seen_end

    async def _end(self, agent: str, run: str, key: ApiKey) -> AgentRun:
        """Wait until the run's end is stored; return the run."""
        while True:
            stored = next(each for each in self._agents.owned(agent, key).runs if each.id == run)
            if stored.state != "RUNNING":
                return stored
            await asyncio.sleep(0.02)


def turn_event(record: TurnSampled | TurnDone, seq: int) -> bytes:
    """The event of a record: the calls of a turn with their arguments, or the results of the calls."""
    attempt = int(record.trajectory.rpartition("-")[2])
    if isinstance(record, TurnSampled):
        calls = [
            {"callId": call.id, "name": call.name, "args": call.arguments, "error": call.error, "status": "running"}
            for call in record.turn.calls
        ]
        data: dict[str, Any] = {"turn": record.turn.index, "attempt": attempt, "toolCalls": calls}
        return event(data, "turn", str(seq))
    results = [
        {"callId": result.call_id, "ok": result.ok, "result": result.output, "status": "completed"}
        for result in record.results
    ]
    return event({"turn": record.index, "attempt": attempt, "toolCalls": results}, "results", str(seq))
