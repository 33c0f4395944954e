"""`headrace export --as data`: the recorded ids of good attempts, as mid-training reads them."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.replay import rejudge
from headrace.replay.fetching import fetch
from headrace.training.data.trajectories import RecordedSegment, TrajectoryReader
from tests.replay.conftest import Finished, Run


@pytest.mark.usefixtures("opened")
def test_good_attempts_become_the_recorded_ids(
    finished: Finished, opened: Server, headrace: Run, tmp_path: Path
) -> None:
    file = tmp_path / "good.jsonl"
    run = str(finished.folder)
    code, said, error = headrace("export", run, str(file), "--as", "data", "--reward", "0.5", "--per-task", "2")
    assert code == 0, error
    lines = file.read_bytes().splitlines()
    made = [msgspec.json.decode(line, type=RecordedSegment) for line in lines]
    assert made and said == [f"{file}: {len(made)} attempts of run {finished.run}, {len(made)} segments"]
    assert max(Counter(segment.task for segment in made).values()) == 2

    async def recorded() -> dict[str, list[int]]:
        async with await Bus.connect(opened.url, role="replay", credentials=opened.credentials) as bus:
            ids_by_attempt = {}
            for group in await rejudge.closings(bus, finished.run):
                trajectories, scores = await fetch(bus, [group])
                for trajectory, score in group.slots:
                    if scores[score].reward >= 0.5:
                        attempt = trajectories[trajectory]
                        ids_by_attempt[attempt.id] = [
                            int(id) for turn in attempt.turns for a in (turn.prompt_ids, turn.ids) for id in a.tolist()
                        ]
            return ids_by_attempt

    ids = asyncio.run(recorded())
    assert all(ids[segment.trajectory] == segment.ids for segment in made)
    text = (finished.folder / "tokenizer.json").read_text()
    document = TrajectoryReader(text, max(map(max, ids.values())) + 1).encode(lines[0], file)
    taught = [place for place, weight in enumerate(document.weights) if weight]
    assert taught == [place for begin, end in made[0].sampled for place in range(begin, end)] and taught
    with pytest.raises(ValueError, match="expected ids of the tokenizer"):
        TrajectoryReader(text + " ", 1000).check(lines[0], file)
    code, _, error = headrace("export", run, str(tmp_path / "none.jsonl"), "--as", "data", "--reward", "1e301")
    assert code == 1 and "lower --reward" in error and not list(tmp_path.glob("*none*"))
    assert headrace("export", run, str(file), "--as", "data")[0] == 2
