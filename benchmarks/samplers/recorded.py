"""Durations of a finished run: its episodes turn by turn, its training steps, its versions on their way to the engine.

    python -m benchmarks.samplers.recorded RUN [--episodes 1000] > benchmarks/traces/episodes.json

The times are those at which the broker stored the run's records. The sampling of a turn lasts from the results before
it (the first: from the start of the attempt, so its sandbox is part of it) to its TurnSampled; its calls from there to
its TurnDone; the end of an episode from its last record to its Trajectory. A step lasts as long as its trainer computed
and scored again; its waits are left out.
"""

import argparse
import random
from collections import defaultdict
from pathlib import Path

import msgspec

from headrace.bus.connection import Bus
from headrace.launch import runs
from headrace.launch.session import bus_of, looped
from headrace.messages.rollout import Trajectory, TurnDone, TurnSampled
from headrace.messages.subjects import EVENT, STEP, TRAJ, TURN
from headrace.messages.training import SnapshotReady, StepDone
from headrace.messages.weights import WeightsStaged, WeightsSwapped

TRACE = Path(__file__).parent.parent / "traces" / "episodes.json"


class RecordedTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of an episode; times in seconds."""

    sample_s: float
    calls_s: float
    """From the sampled turn to the results of all of its calls; 0 for a turn without calls."""
    prompt_tokens: int
    sampled_tokens: int


class RecordedEpisode(msgspec.Struct, frozen=True, array_like=True):
    """One attempt from its start to its Trajectory."""

    end_s: float
    """From its last turn to its Trajectory."""
    turns: tuple[RecordedTurn, ...]

    @property
    def wall_s(self) -> float:
        """Duration of the whole attempt."""
        return self.end_s + sum(turn.sample_s + turn.calls_s for turn in self.turns)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded durations of one run."""

    source: str
    """The run and its conditions, in words."""
    episodes: tuple[RecordedEpisode, ...]
    step_s: tuple[float, ...]
    staged_s: tuple[float, ...]
    """From SnapshotReady to WeightsStaged."""
    swapped_s: tuple[float, ...]
    """From WeightsStaged to WeightsSwapped."""
    pause_ms: tuple[float, ...]
    """Pause of the engine in a swap."""

    @property
    def mean_episode_s(self) -> float:
        """Mean duration of an attempt."""
        return sum(episode.wall_s for episode in self.episodes) / len(self.episodes)


def read(path: Path = TRACE) -> Trace:
    """The trace of a file."""
    return msgspec.json.decode(path.read_bytes(), type=Trace)


async def _episodes(bus: Bus, run: str) -> list[RecordedEpisode]:
    """The attempts of the train lane whose turns are all in the streams."""
    sampled: dict[str, dict[int, float]] = defaultdict(dict)
    done: dict[str, dict[int, float]] = defaultdict(dict)
    async for received in bus.history("HR_TURN", TURN.where(run=run)):
        match received.message:
            case TurnSampled() as record:
                sampled[record.trajectory][record.turn.index] = received.time
            case TurnDone() as record:
                done[record.trajectory][record.index] = received.time
    episodes: list[RecordedEpisode] = []
    async for received in bus.history("HR_TRAJ", TRAJ.where(run=run)):
        made = received.message
        if not isinstance(made, Trajectory) or made.lane != "train":
            continue
        times, results = sampled[made.id], done[made.id]
        if any(turn.index not in times for turn in made.turns):
            continue
        at, turns = received.time - made.wall_s, []
        for turn in made.turns:
            sample_s, at = times[turn.index] - at, times[turn.index]
            calls_s = 0.0
            if turn.calls and turn.index in results:
                calls_s, at = results[turn.index] - at, results[turn.index]
            lengths = len(turn.prompt_ids), len(turn.ids)
            turns.append(RecordedTurn(round(max(sample_s, 0.0), 3), round(max(calls_s, 0.0), 3), *lengths))
        episodes.append(RecordedEpisode(round(max(received.time - at, 0.0), 3), tuple(turns)))
    return episodes


async def record(bus: Bus, run: str, source: str, count: int) -> Trace:
    """The trace of a run with a sample of its episodes."""
    episodes = await _episodes(bus, run)
    if len(episodes) > count:
        episodes = random.Random(0).sample(episodes, count)
    steps = [r.message async for r in bus.history("HR_STEP", STEP.at(run=run)) if isinstance(r.message, StepDone)]
    computed = [step.efficiency.seconds for step in steps if step.efficiency is not None]
    ready: dict[int, float] = {}
    staged: dict[int, float] = {}
    staged_s: list[float] = []
    swapped_s: list[float] = []
    pause_ms: list[float] = []
    async for received in bus.history("HR_EVENT", EVENT.where(run=run)):
        match received.message:
            case SnapshotReady() as event:
                ready.setdefault(event.version, received.time)
            case WeightsStaged() as event if event.version in ready and event.version not in staged:
                staged[event.version] = received.time
                staged_s.append(round(received.time - ready[event.version], 3))
            case WeightsSwapped() as event if event.version in staged:
                swapped_s.append(round(received.time - staged[event.version], 3))
                pause_ms.append(round(event.pause_ms, 3))
    return Trace(
        source=source,
        episodes=tuple(episodes),
        step_s=tuple(round(seconds["busy"] + seconds["rescore"], 3) for seconds in computed),
        staged_s=tuple(staged_s),
        swapped_s=tuple(swapped_s),
        pause_ms=tuple(pause_ms),
    )


def main() -> None:
    """Print the trace of a run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--episodes", type=int, default=1000)
    args = parser.parse_args()

    async def body() -> int:
        folder = runs.find(args.run)
        report = msgspec.json.decode((folder.path / "report.json").read_bytes())
        told = report["conditions"]
        source = (
            f"headrace up, {report['steps']} steps, backend {report['backend']}, {told['cores']} cores, "
            f"load {told['load']}, commit {told['commit']}, {told['date']}"
        )
        async with bus_of(folder) as bus:
            trace = await record(bus, folder.id, source, args.episodes)
        text = msgspec.json.format(msgspec.json.encode(trace), indent=0).decode()  # one episode a line
        print(text.replace("]]], [", "]]],\n["))
        return 0

    looped(body())


if __name__ == "__main__":
    main()
