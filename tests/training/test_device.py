"""A whole step on another device: nothing mixes devices, and the state hash is that of the CPU."""

import copy
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import Algorithm
from headrace.messages.rollout import Span
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe
from headrace.training.batches.batch import Batch
from headrace.training.batches.micro_batch import MicroBatch, device_of, forward
from headrace.training.batches.segment import Segment
from headrace.training.device import TrainerError, device_named
from headrace.training.gradient import Helpers, Recipe
from headrace.training.mismatch import compare
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.sharding import OWNED
from headrace.training.served.versions import Log, Versions
from headrace.training.state import TrainerState
from headrace.training.step import take
from tests.support import other_device
from tests.support.expert_owners import own

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "expert_dim": 32, "vocab": 64}
MIXTURE = PolicyConfig(**SHAPE, experts=4, top_k=2)  # type: ignore[arg-type]
POLICIES = {
    "dense": PolicyConfig(**SHAPE, experts=0, top_k=0),  # type: ignore[arg-type]
    "mixture": MIXTURE,
    "bfloat16": msgspec.structs.replace(MIXTURE, dtype="bfloat16"),
    "mxfp8": msgspec.structs.replace(MIXTURE, expert_format="mxfp8"),
    "nvfp4": msgspec.structs.replace(MIXTURE, expert_format="nvfp4"),
    "latent": msgspec.structs.replace(
        MIXTURE,
        kv_heads=2,
        head_dim=24,
        latent=Latent(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16),
        scores="sigmoid",
        shared_experts=1,
        dense_layers=1,
    ),
}
ALGORITHM = Algorithm(learning_rate=1e-2, kl_weight=0.1, minibatches=2, weighting="decoupled", grad_clip=0.05)


def batch(config: PolicyConfig) -> Batch:
    generator = torch.Generator().manual_seed(3)
    segments = []
    for index, length in enumerate((9, 5, 17, 12)):
        rows = (length, config.sparse_layers, config.experts)
        routed = torch.rand(rows, generator=generator).argsort(-1)[..., : config.top_k] if config.experts else None
        positions = torch.arange(2, length)
        segment = Segment(
            trajectory=f"t{index}",
            ids=torch.randint(0, config.vocab, (length,), generator=generator),
            positions=positions,
            targets=torch.randint(0, config.vocab, positions.shape, generator=generator),
            behaviour=-4.0 + torch.rand(positions.shape, generator=generator),
            versions=torch.zeros_like(positions),
            routed=routed,
            spans=(Span(0, length, 0),),
            advantage=0.5 - index % 2,
            temperature=1.0,
            index=index,
        )
        segments.append(segment)
    return Batch(tuple(segments), 4, (1.0, 0.0, 1.0, 0.0), 2, ("g",), frozenset({"f"}))


def test_inputs_are_made_where_offloaded_weights_are_computed_with() -> None:
    model = Model(MIXTURE, probe(MIXTURE), seed=1)
    assert device_of(model) == torch.device("cpu")
    model.place = torch.device("meta")  # as `sharding.build` does, whose shards may be in the host's memory
    assert MicroBatch.of(batch(MIXTURE).segments[:1], device_of(model)).ids.device == model.place


def two_steps(
    model: Model, reference: Model, data: Batch, moments: torch.dtype = torch.float32, offload: bool = False
) -> list[StepOutcome]:
    state = TrainerState(model, settings=OptimizerSettings(moments=moments), offload=offload)
    helpers = Helpers(reference)
    state.log = Log()
    versions, outcomes = Versions(model, 0), []
    for _ in range(2):
        for segment in data.segments[:2]:
            compare(versions, segment)  # re-scoring by the version that wrote it
        outcomes.append(take(state, data, Recipe(ALGORITHM, 24, bound=1), helpers=helpers))
        versions.advance(state.version, state.log)
        state.log = Log()
    if offload:
        held = [tensor for name, tensor in state.tensors().items() if not name.startswith("frozen.")]
        assert not any(isinstance(tensor, other_device.Elsewhere) for tensor in held), "all of it is on the host"
        saved, digest = state.tensors(), state.hash()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert state.hash() != digest
        state.restore(saved, version=state.version, step=state.step)
        assert state.hash() == digest
    return outcomes


# The mixture in float32 and bfloat16 has all that the dense model has.
SLOW = {"dense", "latent", "mxfp8", "nvfp4"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in POLICIES]
)
def test_another_device_gives_the_cpus_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = POLICIES[name]
    numerics, data = probe(config), batch(config)
    model = Model(config, numerics, seed=1)
    model.recompute = name == "mixture"
    reference = Model(config, numerics, seed=2)
    here = two_steps(copy.deepcopy(model), copy.deepcopy(reference), data)
    assert not here[0].failed and here[0].grad_norm > 0.0, here[0].detail
    other_device.moved(model)
    other_device.moved(reference)
    with other_device.installed(monkeypatch):
        there = two_steps(model, reference, data)
    same = [msgspec.structs.replace(outcome, seconds=0.0) for outcome in here]
    assert [str(msgspec.structs.replace(outcome, seconds=0.0)) for outcome in there] == [str(one) for one in same]
    assert set(reads()) <= READ | READ_PER_PARAMETER, "a micro-batch is moved to the device once and read never"


READ = {
    "policy/scoring.py",  # log-probabilities of a span that is scored again
    "training/gradient.py",  # those of the proximal policy by micro-batch, and the sums of a part
    "training/mismatch.py",  # routes of a sequence that is scored again
    "training/state.py",  # the norms of all gradients at once
}
"""Files of headrace that read from the device in a step, as often for any number of layers."""
READ_PER_PARAMETER = {
    "training/served/versions.py",  # behind an update: the number of elements that changed
    "weights/tensor_state.py",  # the state hash
}
"""Files that read every parameter, outside of the forward and the backward pass."""


def reads() -> dict[str, int]:
    """How often the host has read from the device, by file."""
    counts: dict[str, int] = {}
    for site, count in other_device.READS.items():
        file = site.rpartition(":")[0] or site
        counts[file] = counts.get(file, 0) + count
    return counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mixture" else [pytest.mark.slow]) for name in POLICIES]
)
def test_the_host_reads_as_often_for_any_number_of_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (2, 4):
        config = msgspec.structs.replace(POLICIES[name], layers=layers)
        numerics = probe(config)
        model, reference = Model(config, numerics, seed=1), Model(config, numerics, seed=2)
        model.recompute = name == "mixture"
        other_device.moved(model)
        other_device.moved(reference)
        with other_device.installed(monkeypatch):
            outcomes = two_steps(model, reference, batch(config))
        assert not outcomes[0].failed and outcomes[0].grad_norm > 0.0
        counts.append(reads())
    few, many = ({file: count for file, count in each.items() if file not in READ_PER_PARAMETER} for each in counts)
    assert few == many, "no layer makes the host wait for the device"
    assert few and set(few) <= READ


@pytest.mark.parametrize("layers", [2, 4])
def test_the_host_reads_the_counts_of_owned_experts_once_a_pass_for_any_number_of_layers(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and a backward pass of two ranks, with recorded routes. Activations are computed again."""
    config = msgspec.structs.replace(MIXTURE, layers=layers)
    numerics, store, segments = probe(config), HashStore(), batch(config).segments
    models = [Model(config, numerics, seed=1) for _ in range(2)]

    def process(rank: int) -> None:
        with other_device.also_here():
            own(models[rank], store, rank)
            micro = MicroBatch.of(segments[2 * rank : 2 * rank + 2], device_of(models[rank]))
            torch.autograd.backward(forward(models[rank], micro)[0].sum())

    for model in models:
        model.recompute = True
        other_device.moved(model)
    with other_device.installed(monkeypatch), ThreadPoolExecutor(2) as pool:
        list(pool.map(process, range(2)))
    assert reads() == {"training/parallel/experts.py": 2}, "one of each rank"
    shards = [part for model in models for name, part in model.named_parameters() if name.endswith(OWNED)]
    assert len(shards) == 4 * layers and all(part.grad is not None for part in shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments", "offload"),
    [
        ("dense", torch.uint8, True),
        ("mixture", torch.float32, True),
        ("bfloat16", torch.uint8, True),
        ("bfloat16", torch.uint8, False),
        ("mxfp8", torch.bfloat16, True),
        ("latent", torch.float32, True),
    ],
)
def test_an_optimizer_on_the_host_or_of_eight_bits_gives_the_cpus_bits(
    name: str, moments: torch.dtype, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = POLICIES[name]
    numerics, data = probe(config), batch(config)
    model, reference = Model(config, numerics, seed=1), Model(config, numerics, seed=2)
    here = two_steps(copy.deepcopy(model), copy.deepcopy(reference), data, moments)
    other_device.moved(model)
    other_device.moved(reference)
    with other_device.installed(monkeypatch):
        there = two_steps(model, reference, data, moments, offload)
    assert not here[0].failed and here[0].state_hash != here[1].state_hash
    assert [outcome.state_hash for outcome in there] == [outcome.state_hash for outcome in here]


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("mxfp8", torch.uint8),
        pytest.param("mixture", torch.float32, marks=pytest.mark.slow),
        pytest.param("bfloat16", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_updates_on_the_host_serve_the_cpus_bits(
    name: str, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = OptimizerSettings(moments=moments)
    here = Model(POLICIES[name], Numerics(exact=False, reason="", fingerprint=""), seed=1)
    states = [TrainerState(here, settings=settings)]
    there = other_device.moved(copy.deepcopy(here))
    assert isinstance(there, Model)
    with other_device.installed(monkeypatch):
        states.append(TrainerState(there, settings=settings, offload=True))
        for number in range(3):
            draw = torch.Generator().manual_seed(number)
            for parameter, other in zip(here.parameters(), there.parameters(), strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                other.grad = other_device.Elsewhere(parameter.grad.clone())
            for state in states:
                state.apply(1e-2, 0.5)
        assert states[0].hash() == states[1].hash()
        held = states[1].tensors().values()
        assert not any(isinstance(tensor, other_device.Elsewhere) for tensor in held), "all of it is on the host"


def test_a_device_that_is_not_there_is_refused() -> None:
    assert device_named("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_named("cpu").type == "cpu"
    for name, says in (("tpu9", "expected auto"), ("cuda:99", "has no cuda:99"), ("mps", "has no mps")):
        with pytest.raises(TrainerError, match=says):
            device_named(name)
