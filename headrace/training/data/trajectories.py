"""Own trajectories: the recorded ids of a run's attempts, which are never tokenised again.

`headrace export --as data` writes the file: one line per segment of an attempt whose reward reached a threshold.
"""

from hashlib import sha256
from pathlib import Path

import msgspec

from headrace.messages.rollout import Trajectory
from headrace.training.data.base import Document, Lines


class RecordedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the context of one segment, and which parts of it were sampled."""

    ids: list[int]
    sampled: list[tuple[int, int]]
    """Begin and end of each turn in `ids`."""
    trajectory: str
    segment: int
    task: str
    reward: float
    tokenizer: str
    """`tokenizer_hash` of the run."""


def tokenizer_hash(tokenizer_json: str) -> str:
    """The name of a tokenizer: ids of another one mean other text."""
    return sha256(tokenizer_json.encode()).hexdigest()


def segments(trajectory: Trajectory, reward: float, tokenizer: str) -> list[RecordedSegment]:
    """The segments of an attempt: its recorded ids, turn after turn. tokenizer: its `tokenizer_hash`."""
    ids: dict[int, list[int]] = {}
    sampled: dict[int, list[tuple[int, int]]] = {}
    for turn in trajectory.turns:
        segment_ids = ids.setdefault(turn.segment, [])
        segment_ids += map(int, turn.prompt_ids.tolist())
        begin = len(segment_ids)
        segment_ids += map(int, turn.ids.tolist())
        sampled.setdefault(turn.segment, []).append((begin, len(segment_ids)))
    return [
        RecordedSegment(
            ids=segment_ids,
            sampled=sampled[number],
            trajectory=trajectory.id,
            segment=number,
            task=f"{trajectory.task.suite}/{trajectory.task.task}",
            reward=reward,
            tokenizer=tokenizer,
        )
        for number, segment_ids in ids.items()
    ]


class TrajectoryReader(Lines):
    """Reads segments that one tokenizer wrote."""

    def __init__(self, tokenizer_json: str, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer_hash(tokenizer_json), vocab
        self._decoder = msgspec.json.Decoder(RecordedSegment)

    def check(self, record: bytes, path: Path) -> None:
        """Ids of this tokenizer, and turns that lie within them."""
        self._segment(record)

    def encode(self, record: bytes, path: Path) -> Document:
        """The recorded ids; sampled ones are the targets."""
        segment = self._segment(record)
        weights = [0.0] * len(segment.ids)
        for begin, end in segment.sampled:
            weights[begin:end] = [1.0] * (end - begin)
        return Document(ids=segment.ids, weights=weights)

    def _segment(self, record: bytes) -> RecordedSegment:
        segment = self._decoder.decode(record)
        if segment.tokenizer != self._tokenizer:
            raise ValueError(f"expected ids of the tokenizer {self._tokenizer[:12]}, got {segment.tokenizer[:12]}")
        if not segment.ids or min(segment.ids) < 0 or max(segment.ids) >= self._vocab:
            raise ValueError(f"expected ids from 0 to {self._vocab - 1}, got others or none")
        if any(not 0 <= begin <= end <= len(segment.ids) for begin, end in segment.sampled):
            raise ValueError(f"expected turns within the {len(segment.ids)} ids, got {segment.sampled}")
        return segment
