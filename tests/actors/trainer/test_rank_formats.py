"""Number formats and architectures over ranks, also where experts have owners and where ranks share the tokens of a
micro-batch: a replay in the same layout has the same bits, and one process differs by rounding."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.initial_policy import BUNDLE
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.config import Mesh
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.rendering.bundle import terse_bundle
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.weights import tensor_state
from tests.support import tiny, world
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]

# Every shard of four ranks has a multiple of eight elements.
DENSE = msgspec.structs.replace(world.POLICY, heads=8, kv_heads=4, head_dim=32, experts=0, top_k=0)
MIXTURE = msgspec.structs.replace(DENSE, experts=4, top_k=2)
LATENT = msgspec.structs.replace(
    MIXTURE, kv_heads=8, scores="sigmoid", shared_experts=1, dense_layers=1, dense_dim=64,
    latent=Latent(q_rank=32, kv_rank=32, nope_dim=24, rope_dim=8, value_dim=32),
)  # fmt: skip
FEW = msgspec.structs.replace(MIXTURE, experts=2)
SHAPES = {"dense": DENSE, "mixture": MIXTURE, "latent": LATENT, "few": FEW}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "mxfp8": {"dtype": "bfloat16", "expert_format": "mxfp8"},
}
STEPS = 8


class Kind(NamedTuple):
    """A policy."""

    shape: str
    format: str

    def __str__(self) -> str:
        return f"{self.shape}_{self.format}"

    @property
    def policy(self) -> PolicyConfig:
        return msgspec.structs.replace(SHAPES[self.shape], **FORMATS[self.format])


class Ranks(NamedTuple):
    """A division of the work."""

    shard: int = 1
    expert: int = 1
    context: int = 1

    def __str__(self) -> str:
        return f"ranks{self.shard}_experts{self.expert}_context{self.context}"


class Run:
    """A run of six trajectories a batch, each a micro-batch of its own, so the last round of four ranks is not full."""

    def __init__(self, admin: Bus, folder: Path, kind: Kind, algorithm: Mapping[str, Any] | None = None) -> None:
        """folder: empty. algorithm: settings of its objective."""
        self.root, self.kind, self.algorithm = folder, kind, algorithm or {}
        self.first = Model(kind.policy, tiny.numerics(kind.policy), seed=1)
        checkpoint.save(folder / "model", self.first, kind.policy)
        make = partial(Model, kind.policy, tiny.numerics(kind.policy), seed=None)
        self.feeder = RunFeeder(admin, new_run(), folder, make)
        self.feeder.size = 3
        (self.feeder.folder / BUNDLE).write_bytes(msgspec.json.encode(terse_bundle(world.TOKENIZER)))

    def settings(self, ranks: Ranks, moments: str = "float32", **trainer: Any) -> Any:
        return config(
            self.root,
            policy={"checkpoint": str(self.root / "model")},
            curriculum={"group_size": 3, "groups_per_step": 2, "steps": 50},
            trainer={"micro_tokens": 9, "rescore": 6, "mesh": Mesh(**ranks._asdict()), **trainer},
            algorithm={"grad_clip": 0.05, "moments": moments, **self.algorithm},
        )

    async def kept(self, version: int) -> None:
        """Wait for the checkpoint of a version."""
        where = EVENT.where(run=self.feeder.run, actor="trainer", type="event")
        async with asyncio.timeout(PATIENCE_S):
            async for received in self.feeder.bus.follow("HR_EVENT", where):
                if received.message.kind == "checkpoint" and received.message.data["version"] == version:
                    return

    def tensors(self, version: int, head: str) -> dict[str, Tensor]:
        """Masters or moments of a version's checkpoint, by parameter."""
        file = self.feeder.folder / "checkpoints" / f"v{version:08d}.safetensors"
        named = tensor_state.read(file).items()
        return {name.removeprefix(head): value.clone() for name, value in named if name.startswith(head)}


class Result(NamedTuple):
    """The outcome of a run."""

    hashes: list[str]
    done: list[StepDone]
    start: dict[str, Tensor]
    """Masters of version 0."""
    gradient: dict[str, Tensor]
    """AdamW's first moment behind the first update: a multiple of its gradient."""
    masters: dict[str, Tensor]
    corrections: dict[str, Tensor]
    """Of routers, behind the first step."""


async def trained(
    server: Server,
    folder: Path,
    kind: Kind,
    ranks: Ranks,
    steps: int = STEPS,
    algorithm: Mapping[str, Any] | None = None,
    cut_off: int = 0,
    **trainer: Any,
) -> Result:
    """A run that is not disturbed. Its replay, by other processes, has its bits. cut_off: as in `RunFeeder`."""
    async with (
        await as_writers(server.url, server.credentials) as admin,
        await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
    ):
        run = Run(admin, folder, kind, algorithm)
        feeder = run.feeder
        feeder.cut_off = cut_off
        async with living(Trainer, run.settings(ranks, checkpoint_every=1, **trainer), bus, feeder.run):
            for number in range(steps):
                await feeder.batch(number)
            await feeder.version(steps)
            await run.kept(steps)
        done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert len(done) == steps, "no step failed"
    async with await Bus.connect(server.url, role="replay", credentials=server.credentials) as bus:
        recorded = await of_run(bus, run.settings(ranks, **trainer), feeder.folder, feeder.run)
        replays = [each async for each in replay_steps(recorded, range(steps))]
    assert all(each.bitwise_equal and each.layout_match for each in replays), replays
    hashes = [feeder.hashes[number] for number in range(steps + 1)]
    start = {name: parameter.detach().float() for name, parameter in run.first.named_parameters()}
    first, last, fixed = run.tensors(1, "exp_avg."), run.tensors(steps, "master."), run.tensors(1, "frozen.")
    return Result(hashes, done, start, first, last, fixed)


ONE = Ranks()
Results = dict[tuple[Kind, Ranks, int], Result]


@pytest.fixture(scope="module")
def results() -> Results:
    """Results that several tests compare: by policy, division of the work and number of steps."""
    return {}


async def kept(
    results: Results, server: Server, tmp_path: Path, kind: Kind, ranks: Ranks = ONE, steps: int = STEPS
) -> Result:
    """The result of a run, computed once; of one process unless `ranks` says otherwise."""
    if (kind, ranks, steps) not in results:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        results[kind, ranks, steps] = await trained(server, folder, kind, ranks, steps)
    return results[kind, ranks, steps]


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The L2 norm of the difference of all tensors of `right`."""
    return math.sqrt(sum(float((left[name].double() - right[name].double()).square().sum()) for name in right))


def relative_error(result: Result, expected: Result) -> float:
    """Relative L2 error of the update that all steps make together."""
    return apart(result.masters, expected.masters) / apart(expected.start, expected.masters)


def gradient_error(result: Result, expected: Result) -> float:
    """Relative L2 error of the first step's gradient, clipped."""
    return apart(result.gradient, expected.gradient) / math.hypot(
        *(float(part.double().norm()) for part in expected.gradient.values())
    )


def assert_the_first_step_has_the_bits(result: Result, expected: Result) -> None:
    """Log-probabilities: all of the first batch's are the sampler's, in the step and scored again, so all are equal."""
    first, other = result.done[0], expected.done[0]
    assert result.hashes[0] == expected.hashes[0]
    assert (first.k1, first.k3, first.max_abs_dlp) == (0.0, 0.0, 0.0) == (other.k1, other.k3, other.max_abs_dlp)
    assert first.rescored_tokens == first.tokens == other.tokens > 0
    assert (first.loss, first.entropy) == (other.loss, other.entropy)
    assert all(record.max_abs_dlp == 0.0 and record.exact for record in result.done), "Law 5"


BOUNDS = {"float32": (1e-6, 5e-5), "bfloat16": (1e-2, 0.1), "mxfp8": (0.05, 0.3)}
"""Of `gradient_error` and `relative_error`."""


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (Kind("dense", "float32"), Ranks(4)),
        (Kind("dense", "bfloat16"), Ranks(2)),
        (Kind("mixture", "float32"), Ranks(4, expert=2)),
        (Kind("mixture", "bfloat16"), Ranks(4, expert=2)),
        (Kind("mixture", "mxfp8"), Ranks(2, expert=2)),
        (Kind("few", "bfloat16"), Ranks(4, expert=2)),
        (Kind("few", "mxfp8"), Ranks(4, expert=2)),
        (Kind("latent", "float32"), Ranks(2, expert=2)),
        (Kind("latent", "bfloat16"), Ranks(4, expert=4)),
        (Kind("dense", "float32"), Ranks(2, context=2)),
        (Kind("dense", "bfloat16"), Ranks(4, context=2)),
        (Kind("mixture", "bfloat16"), Ranks(4, expert=2, context=2)),
        (Kind("mixture", "mxfp8"), Ranks(2, expert=2, context=2)),
        (Kind("latent", "float32"), Ranks(4, context=4)),
    ],
    ids=str,
)
async def test_ranks_differ_from_one_process_by_rounding(
    server: Server, results: Results, tmp_path: Path, kind: Kind, ranks: Ranks
) -> None:
    expected = await kept(results, server, tmp_path, kind)
    result = await trained(server, tmp_path, kind, ranks)
    assert_the_first_step_has_the_bits(result, expected)
    text = f"gradient {gradient_error(result, expected):.1e}, update {relative_error(result, expected):.1e}"
    print(text)
    gradient, update = BOUNDS[kind.format]
    assert gradient_error(result, expected) < gradient and relative_error(result, expected) < update, text


OBJECTIVE = {"weight_decay": 0.1, "balance_rate": 0.01, "overlong": "mask", "weighting": "clipped", "dual_clip": 3.0}


async def test_settings_of_the_objective_hold_over_ranks(server: Server, tmp_path: Path) -> None:
    """Decay, balance, masked attempts and dual clip: two ranks replay with their bits, and one process differs by
    rounding."""
    kind, results = Kind("latent", "float32"), []
    for ranks in (ONE, Ranks(2, expert=2)):
        (tmp_path / str(ranks)).mkdir()
        results.append(await trained(server, tmp_path / str(ranks), kind, ranks, 4, OBJECTIVE, cut_off=1))
    expected, result = results
    assert_the_first_step_has_the_bits(result, expected)
    gradient, update = BOUNDS["float32"]
    assert gradient_error(result, expected) < gradient and relative_error(result, expected) < update
    for name, correction in expected.corrections.items():
        assert torch.equal(result.corrections[name], correction) and correction.any(), name
    assert len(expected.corrections) == 1, "of the layer behind the dense one"
    assert all(record.efficiency is not None and record.efficiency.expert_load > 1.0 for record in result.done)


async def lives(
    server: Server, run: Run, divisions: Sequence[Ranks], batches: Sequence[Sequence[int]]
) -> list[StepDone]:
    """Train with one division of the work after the other, each stopped two steps behind its last checkpoint; the
    records of all steps. batches: new ones of each life, the first of which waits for a version that replaces the last
    one."""
    feeder = run.feeder
    for ranks, new in zip(divisions, batches, strict=True):
        async with (
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
            living(Trainer, run.settings(ranks, checkpoint_every=3), bus, feeder.run),
        ):
            if new[0]:  # the last version of the life before, with other bits
                await feeder.version(new[0], instead_of=feeder.hashes[new[0]])
            for number in new:
                await feeder.batch(number)
            await feeder.version(new[-1] + 1)
            if ranks == divisions[-1]:
                await run.kept(new[-1] + 1)
    return [record for record in await feeder.steps() if isinstance(record, StepDone)]


async def test_resumed_with_ranks_that_round_otherwise_the_repeated_steps_are_new_incarnations(
    server: Server, results: Results, tmp_path: Path
) -> None:
    """Two ranks that share tokens cannot repeat what ranks with micro-batches of their own computed. Tokens of a
    replaced version are scored again with the bits that replace it: another log-probability by rounding, until they are
    too old."""
    kind = Kind("mixture", "float32")
    expected = await kept(results, server, tmp_path, kind, steps=9)
    async with await as_writers(server.url, server.credentials) as admin:
        run = Run(admin, tmp_path, kind)
        divisions = (Ranks(2, expert=2), Ranks(2, expert=2, context=2))
        done = await lives(server, run, divisions, ((0, 1, 2, 3, 4), (5, 6, 7, 8)))
    order = [(step, 0) for step in range(5)] + [(3, 1), (4, 1), (5, 0), (6, 0), (7, 0), (8, 0)]
    assert [(record.step, record.incarnation) for record in done] == order
    last = {record.step: record for record in done}
    assert all(last[step].groups == record.groups for step, record in enumerate(expected.done)), "trained once"
    mixed = {(4, 1), (5, 0)}  # they hold tokens of a version that was replaced
    for record in done:
        assert record.max_abs_dlp <= (1e-5 if (record.step, record.incarnation) in mixed else 0.0)
    error = relative_error(Result([], done, {}, {}, run.tensors(9, "master."), {}), expected)
    print(f"update {error:.1e}, log-probabilities {max(record.max_abs_dlp for record in done):.1e}")
    assert 0.0 < error <= 5e-5, f"{error:.1e}"


async def test_moments_of_eight_bits_and_shards_on_the_host_go_on_with_other_ranks(
    server: Server, tmp_path: Path
) -> None:
    """2 ranks, then 1, then 4: each reads the codes and scales that the one before wrote."""
    kind, moments = Kind("dense", "float32"), "eight_bit"
    (tmp_path / "one").mkdir()
    expected = await trained(server, tmp_path / "one", kind, Ranks(), 4, moments=moments)
    async with await as_writers(server.url, server.credentials) as admin:
        run = Run(admin, tmp_path, kind)
        feeder = run.feeder
        for ranks, batches, offload in ((2, (0, 1), "optimizer"), (1, (2,), "none"), (4, (3,), "optimizer")):
            settings = run.settings(Ranks(ranks), moments, checkpoint_every=1, offload=offload)
            async with (
                await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
                living(Trainer, settings, bus, feeder.run),
            ):
                for number in batches:
                    await feeder.batch(number)
                await feeder.version(batches[-1] + 1)
                await run.kept(batches[-1] + 1)
    assert feeder.hashes[0] == expected.hashes[0]
    codes, scales = (run.tensors(4, head)["layers.0.qkv"] for head in ("exp_avg_sq.", "exp_avg_sq_scale."))
    assert codes.dtype == torch.uint8 and scales.shape == (len(codes), 1)
    error = relative_error(Result([], [], expected.start, {}, run.tensors(4, "master."), {}), expected)
    print(f"update {error:.1e}")
    assert 0.0 < error < 0.01, f"{error:.1e}"
