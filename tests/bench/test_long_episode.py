"""Every token of an episode far longer than its window is counted once, and trained as it was sampled.

A scripted policy reads pieces of a repository until the episode has so many tokens, and writes a summary whenever it is
asked for one. The loop, the renderer, the tools, the context and the trainer's segments are headrace's own. The count
by kind (`headrace.bench.tokens`) is compared with three others: the hashes of all requests to the engine, the texts of
the results encoded once more, and the tokens that a trainer would train on.
"""

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.bench.tokens import tokens_of
from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.harness.loop import Episode, run_episode
from headrace.harness.sync_tools import answer
from headrace.messages.base import Array
from headrace.messages.codec import decode, encode
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.rendering.base import Call
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import traces
from headrace.tasks.local import LocalFiles
from tests.support.segments import segments_of

pytestmark = pytest.mark.anyio

LINES, FILES, PIECE = 1200, 40, 60
"""Lines of a file, files, and lines that one call reads."""
REF = TaskRef("long", "0")


def hashed(ids: Sequence[int]) -> bytes:
    """The hash of ids."""
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=16).digest()


def repository(seed: int) -> dict[str, bytes]:
    """Generated modules."""
    draws = random.Random(seed)
    words = "value count total index result items left right first last size offset".split()

    def line() -> str:
        return f"    {draws.choice(words)} = {draws.choice(words)}({draws.choice(words)}, {draws.randrange(10_000)})"

    return {f"kit/part_{n:02}.py": "\n".join(line() for _ in range(LINES)).encode() for n in range(FILES)}


class Reader:
    """An engine whose policy reads one piece after the other, two calls in a turn."""

    def __init__(self, renderer: TerseRenderer, paths: Sequence[str], tokens: int) -> None:
        """tokens: of the whole episode, after which it finishes."""
        self._renderer, self._paths, self._wanted = renderer, paths, tokens
        self._request = renderer.delta([_empty()], stopped=renderer.stop_ids[0], summary=True)
        self._place = self._ended = 0
        self.asked: list[bytes] = []
        """Hash of every request and what was sampled for it."""
        self.longest = 0

    @property
    def fingerprint(self) -> str:
        """Empty: a script has no numerics."""
        return ""

    @property
    def version(self) -> int:
        """The version that its spans name."""
        return 0

    def _piece(self) -> Call:
        per_file = LINES // PIECE
        path = self._paths[self._place // per_file % len(self._paths)]
        first = self._place % per_file * PIECE + 1
        self._place += 1
        return "read_file", {"path": path, "lines": f"{first}-{first + PIECE - 1}"}

    async def sample(self, request: SampleRequest) -> Sample:
        """A summary where one is asked for, else two reads, and finish at the end."""
        encode, stop = self._renderer.tokenizer.encode, self._renderer.stop_ids[0]
        if list(request.ids[-len(self._request) :]) == self._request:
            ids = [*encode(f"Read {self._place} pieces; go on with the next one. Nothing was found so far."), stop]
            self._ended += len(request.ids) + len(ids)
        elif self._ended + len(request.ids) >= self._wanted:
            ids = self._renderer.turn([("finish", {})])
        else:
            ids = self._renderer.turn([self._piece(), self._piece()])
        self.longest = max(self.longest, len(request.ids) + len(ids))
        self.asked.append(hashed((*request.ids, *ids)))
        span = Span(0, len(request.ids) + len(ids) - 1, 0)
        return Sample(ids=tuple(ids), logprobs=(0.0,) * len(ids), routed=None, spans=(span,), stop="stop")

    async def close(self, session: str) -> None:
        """Nothing is held."""

    async def stop(self) -> None:
        """Nothing runs."""

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """EngineError: a script has no weights."""
        raise EngineError("a scripted policy has no weights to load")

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """EngineError: a script has no weights."""
        raise EngineError("a scripted policy has no weights to pin")

    async def unpin(self, version: int) -> None:
        """Nothing is pinned."""


def _empty() -> Turn:
    none = Array.of([], "<i4")
    return Turn(index=0, segment=0, prompt_ids=none, ids=none, logprobs=Array.of([], "<f4"))


async def measure(tokens: int, window: int) -> dict[str, Any]:
    """Run the episode and account for it."""
    renderer = TerseRenderer(Tokenizer.train(traces.tokenizer_texts(3, 150, Format(), answer), 640))
    files = repository(7)
    task = Task(ref=REF, family="long", prompt="find the fault", files=files, allowed=("**",), tests=TestPlan())
    limits = Limits(
        max_turns=1 << 20, max_tokens=1 << 30, context_tokens=window, wall_s=1e6, reserve_tokens=window // 4,
        max_summaries=1 << 20,
    )  # fmt: skip
    request = RolloutRequest(
        run="long", lane="train", group="g000001", slot=0, attempt=0, task=REF, seed=1, limits=limits,
        sampling=Sampling(max_turn_tokens=1024),
    )  # fmt: skip
    engine = Reader(renderer, sorted(files), tokens)
    episode = await run_episode(engine=engine, sandbox=LocalFiles(files), renderer=renderer, request=request, task=task)
    assert engine.longest <= window
    return account(episode, engine, renderer, request)


def account(episode: Episode, engine: Reader, renderer: TerseRenderer, request: RolloutRequest) -> dict[str, Any]:
    """The tokens by kind, and the number of tokens and turns for which another count differs."""
    kinds = tokens_of(episode.turns)
    trajectory = Trajectory(
        run=request.run, lane="train", group=request.group, slot=0, attempt=0, id=request.trajectory, task=REF,
        family="long", seed=1, policy=request.policy, sampling=request.sampling, outcome=episode.outcome,
        turns=episode.turns, diff={},
    )  # fmt: skip
    data, headers = encode(trajectory)
    stored = decode(data, headers)
    assert isinstance(stored, Trajectory)
    segments: dict[int, list[int]] = {}
    other_requests = 0
    for turn, asked in zip(stored.turns, engine.asked, strict=True):
        ids = segments.setdefault(turn.segment, [])
        ids += [*turn.prompt_ids.tolist(), *turn.ids.tolist()]
        other_requests += hashed(ids) != asked
    text = renderer.tokenizer.encode
    # The last turn is left out: no prompt contains the results of finish.
    results = [result for turn in stored.turns[:-1] for result in turn.results]
    tool = sum(len(text(result.output)) for result in results)
    # Two tags frame a result. Behind the results stand the tags that open a turn, two of them in front of a summary.
    read = [turn for turn in stored.turns if turn.index and stored.turns[turn.index - 1].segment == turn.segment]
    frames = 2 * len(results) + sum(1 + (turn.kind == "summary") for turn in read)
    trained = segments_of(stored, 1.0)
    sampled = [id for turn in stored.turns for id in turn.ids.tolist()]
    targets = [id for segment in trained for id in segment.targets.tolist()]
    alive = segments[stored.turns[-1].segment]
    return {
        "tokens": kinds.total,
        "prompt_tokens": kinds.prompt,
        "sampled_tokens": kinds.acting,
        "tool_tokens": tool,
        "frame_tokens": frames,
        "summary_tokens": kinds.summary,
        "segments": len(segments),
        "outcome": episode.outcome,
        "requests_that_differ": other_requests,
        "tokens_unaccounted": abs(kinds.total - sum(map(len, segments.values())))
        + abs(kinds.observed - tool - frames)
        + abs(kinds.total - kinds.dropped - kinds.summary - len(alive)),
        "trained_wrong": abs(len(targets) - len(sampled)) + sum(a != b for a, b in zip(targets, sampled, strict=False)),
        "forwarded_wrong": abs(sum(len(segment.ids) for segment in trained) - (kinds.total - len(segments))),
    }


async def test_every_token_of_a_long_episode_is_accounted_for() -> None:
    figures = await measure(25_000, 4096)
    assert figures["outcome"] == "finished" and figures["segments"] > 3 and figures["tokens"] >= 25_000
    wrong = ("requests_that_differ", "tokens_unaccounted", "trained_wrong", "forwarded_wrong")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    kinds = ("prompt_tokens", "sampled_tokens", "tool_tokens", "frame_tokens", "summary_tokens")
    assert sum(figures[kind] for kind in kinds) == figures["tokens"]
