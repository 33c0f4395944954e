"""Plays multi-turn sessions on a real engine and keeps the record a trainer would get."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.engines.base import Engine, Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.rollout import PolicyRef, Sampling, Span
from headrace.policy import moe, scoring
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.rendering.tokenizer import Tokenizer
from headrace.weights import tensor_state
from tests.support import tiny

LATEST = PolicyRef()


def request(
    session: str = "s",
    ids: tuple[int, ...] = (1, 2, 3),
    *,
    tokens: int = 8,
    temperature: float = 1.0,
    seed: int = 7,
    policy: PolicyRef = LATEST,
    stops: tuple[int, ...] = (),
) -> SampleRequest:
    """A request of a session."""
    sampling = Sampling(temperature=temperature, max_turn_tokens=tokens)
    return SampleRequest(session=session, ids=ids, policy=policy, sampling=sampling, stop_ids=stops, seed=seed)


class Versions:
    """Published files of a policy: version v has the weights of seed v mod 4."""

    def __init__(self, config: PolicyConfig, folder: Path, *, exact: bool = True, device: str = "cpu") -> None:
        self.config, self.exact, self.device = config, exact, device
        self.files = []
        self.models = [tiny.model(config, exact=exact, seed=seed, device=device) for seed in range(4)]
        for seed, model in enumerate(self.models):
            path = folder / f"{seed}.safetensors"
            state = {name: tensor.cpu() for name, tensor in model.state().items()}
            self.files.append((str(path), tensor_state.write(path, state)))

    def model(self, version: int) -> Model:
        return self.models[version % 4]

    def engine(self, *, max_batch: int = 16, prefill_tokens: int = 2048, cache_blocks: int = 4096) -> EmbeddedEngine:
        return EmbeddedEngine(
            self.config,
            tiny.numerics(self.config, self.exact, self.device),
            max_batch,
            1,
            prefill_tokens=prefill_tokens,
            cache_blocks=cache_blocks,
            device=self.device,
        )

    async def load(self, engine: Engine, version: int) -> None:
        await engine.load(version, *self.files[version % 4])


@dataclass
class Record:
    """One segment."""

    temperature: float
    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    routes: list[tuple[int, Tensor]] = field(default_factory=list)
    swapped_turns: int = 0
    capped: int = 0

    def add(self, appended: list[int], sample: Sample, config: PolicyConfig) -> None:
        self.ids += [*appended, *sample.ids]
        self.targets += range(len(self.ids) - len(sample.ids), len(self.ids))
        self.logprobs += sample.logprobs
        assert len(sample.ids) == len(sample.logprobs) > 0
        ends = [span.end for span in sample.spans]
        again = [(span.start, end) for span, end in zip(sample.spans[1:], ends, strict=False) if span.start != end]
        assert all(start == 0 for start, _ in again), "contiguous, or the whole context again"
        assert ends[-1] == len(self.ids) - 1, "the last sampled token has no forward yet"
        start = sample.spans[0].start
        assert start <= len(self.ids) - len(sample.ids) - 1
        if config.experts:
            rows = moe.from_array(sample.routed, config.sparse_layers, config.top_k)
            first = sample.routed_start if isinstance(sample.routed_start, int) else start
            assert len(rows) == ends[-1] - first
            self.routes.append((first, rows))
        self.spans += sample.spans
        self.swapped_turns += len(sample.spans) > 1
        self.capped += sample.stop == "length"

    def score(self, versions: Versions, routed: Tensor | None = None) -> Tensor:
        models = {span.version: versions.model(span.version) for span in self.spans}
        return scoring.score(models, self.ids, self.spans, self.targets, self.temperature, routed)

    def routed(self) -> Tensor:
        """Rows by position; of several forwards the first counts."""
        first = self.routes[0][1]
        rows = torch.full((len(self.ids), *first.shape[1:]), -1)
        for start, part in self.routes:
            view = rows[start : start + len(part)]
            new = view[:, 0, 0] < 0
            view[new] = part[new]
        return rows


async def at_once(turn: int) -> None:
    """A turn that waits for nothing."""


async def session(
    engine: Engine,
    config: PolicyConfig,
    name: str,
    prompt: list[int],
    seed: int,
    *,
    turns: int = 3,
    cap: int = 24,
    before: Callable[[int], Awaitable[None]] = at_once,
) -> Record:
    """A few turns: some stop early, some run into the cap, some get no results at all before the next. before: awaited
    before each turn."""
    rng = random.Random(seed)
    record = Record(temperature=rng.choice([1.0, 0.6]))
    appended = list(prompt)
    stop_ids = tuple(rng.sample(range(config.vocab), 12)) if seed % 3 else ()
    for turn in range(turns):
        await before(turn)
        sample = await engine.sample(
            SampleRequest(
                session=name,
                ids=(*record.ids, *appended),
                policy=LATEST,
                sampling=Sampling(temperature=record.temperature, max_turn_tokens=cap),
                stop_ids=stop_ids,
                seed=seed * 100 + turn,
            )
        )
        record.add(appended, sample, config)
        assert sample.stop == ("stop" if sample.ids[-1] in stop_ids else "length")
        assert not set(sample.ids[:-1]) & set(stop_ids)
        appended = [rng.randrange(config.vocab) for _ in range(rng.choice([0, 3, 70]))]
    await engine.close(name)
    return record


def prompts(config: PolicyConfig, count: int) -> list[list[int]]:
    """Ragged prompts; every second one starts with the same hundred tokens."""
    shared = tiny.tokens(config, 100, seed=9).tolist()
    out = []
    for i in range(count):
        suffix = tiny.tokens(config, 5 + 37 * i % 150, seed=100 + i).tolist()
        out.append(shared + suffix if i % 2 else suffix)
    return out


async def play(
    versions: Versions, batch: int, *, swaps: bool, turns: int = 3, prefill: int = 2048, blocks: int = 4096
) -> tuple[list[Record], dict[str, int]]:
    """`batch` sessions at once, and, if asked for, one swap after another until they end. Where loading is slower than
    sampling, a turn waits for two swaps since the one before it."""
    engine = versions.engine(prefill_tokens=prefill, cache_blocks=blocks)
    await versions.load(engine, 0)
    config = versions.config
    starts, version, swapped = prompts(config, batch), 0, asyncio.Condition()

    async def before(turn: int) -> None:
        async with swapped:
            await swapped.wait_for(lambda: not swaps or version >= 2 * turn)

    tasks = [
        asyncio.create_task(session(engine, config, f"s{i}", starts[i], i, turns=turns, before=before))
        for i in range(batch)
    ]
    while swaps and not all(task.done() for task in tasks):
        await versions.load(engine, version + 1)
        async with swapped:
            version += 1
            swapped.notify_all()
        for _ in range(6):
            await engine.unpin(-1)  # answered between two steps: let some tokens be drawn before the next swap
    records = [await task for task in tasks]
    stats = engine.stats()
    await engine.stop()
    return records, stats


def assert_equal(versions: Versions, records: list[Record]) -> None:
    for record in records:
        got = record.score(versions)
        assert torch.equal(got, torch.tensor(record.logprobs)), float((got - torch.tensor(record.logprobs)).abs().max())


async def keeps_a_schema(engine: Engine, tokenizer: Tokenizer, stop: int) -> None:
    """Turns with a schema end by themselves with JSON that keeps it."""
    properties = {"a": {"enum": ["x", "yy"]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    for seed in range(3):
        asked = request(f"s{seed}", tokens=1500, seed=seed, stops=(stop,))
        asked = msgspec.structs.replace(asked, answer=json.dumps(schema))
        free = await engine.sample(msgspec.structs.replace(asked, free=True))
        sample = await engine.sample(asked)
        assert sample.ids != free.ids, "no grammar holds a free sample"
        assert sample.stop == "stop", "blanks between its parts may be many, not for ever"
        ids = [id for id in sample.ids if id != stop]  # a server may end a turn where the grammar does
        assert json.loads(tokenizer.decode(ids))["a"] in ("x", "yy"), sample.ids
