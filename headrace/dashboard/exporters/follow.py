"""Follows a run's steps and evaluations and passes their figures to the writers, each record once.

The sequences of the last written records are kept in a file, so that a restarted follower continues.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.bus.connection import Bus
from headrace.dashboard.exporters.figures import figures
from headrace.dashboard.exporters.writers import Writer
from headrace.dashboard.watch import FINISHED
from headrace.messages import subjects
from headrace.messages.operations import Event
from headrace.messages.training import StepDone


class Position(msgspec.Struct):
    """The position of the writers."""

    step: int = 0
    event: int = 0
    steps: int = 0


async def follow(bus: Bus, run: str, writers: Mapping[str, Writer], state: Path) -> None:
    """Write until the run is finished. state: file of the position; a damaged one is an error, not a new start."""
    position = msgspec.json.decode(state.read_bytes(), type=Position) if state.exists() else Position()
    lock = asyncio.Lock()

    async def write(message: object, **at: int) -> None:
        async with lock:
            values = figures(message, position.steps) if isinstance(message, msgspec.Struct) else None  # type: ignore[arg-type]
            if values is not None:
                for writer in writers.values():
                    await asyncio.to_thread(writer.write, *values)
            if isinstance(message, StepDone):
                position.steps = message.step + 1
            for name, seq in at.items():
                setattr(position, name, seq)
            state.parent.mkdir(parents=True, exist_ok=True)
            scratch = state.with_suffix(".new")
            scratch.write_bytes(msgspec.json.encode(position))
            scratch.replace(state)

    async def steps() -> None:
        async for received in bus.follow("HR_STEP", subjects.STEP.at(run=run), start=position.step + 1):
            await write(received.message, step=received.seq)

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(steps())
        async for received in bus.follow("HR_EVENT", subjects.EVENT.where(run=run), start=position.event + 1):
            await write(received.message, event=received.seq)
            if isinstance(received.message, Event) and received.message.kind == FINISHED:
                break
        reader.cancel()
    async for received in bus.history("HR_STEP", subjects.STEP.at(run=run), start=position.step + 1):
        await write(received.message, step=received.seq)
