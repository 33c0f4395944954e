"""The engine's worker on another device: nothing mixes devices, and its samples are those of the CPU."""

import itertools
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.engines.base import Sample, SampleRequest, Swap
from headrace.engines.embedded.jobs import EngineJob
from headrace.engines.embedded.sampling import draw, drawn, uniform
from headrace.engines.embedded.staging import LoadedWeights, Shell, Staging
from headrace.engines.embedded.worker import Worker
from headrace.kernels import batch_invariant, operators
from headrace.messages.rollout import Sampling
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.probing import on_device
from tests.support import other_device, tiny
from tests.support.engines import LATEST, Versions, prompts
from tests.training.test_device import POLICIES

NAMES = [pytest.param(name, marks=[] if name == "mixture" else [pytest.mark.slow]) for name in POLICIES]


def staged(shell: Shell, versions: Versions, number: int) -> LoadedWeights:
    staging = Staging(shell, number, *versions.files[number])
    assert staging.advance(float("inf"))
    return staging.future.result()


def play(config: PolicyConfig, versions: Versions, device: torch.device) -> tuple[list[Sample], list[LoadedWeights]]:
    """Four sessions at once with a swap in flight, then two in turn with one prompt; in this thread."""
    numerics = tiny.numerics(config)
    worker = Worker(config, 8, 1, 23, 64, device)
    first = Shell(config, numerics, device)
    weights = [staged(first, versions, 0)]
    weights.append(staged(Shell(config, numerics, device, None if device.type == "cpu" else first.host), versions, 1))
    worker.flip(weights[0])
    jobs: list[EngineJob] = []
    swaps: list[Swap] = []

    def ask(number: int, prompt: list[int]) -> None:
        sampling = Sampling(temperature=(1.0, 0.6, 0.0)[number % 3], max_turn_tokens=9)
        request = SampleRequest(
            session=f"s{number}", ids=tuple(prompt), policy=LATEST, sampling=sampling, stop_ids=(), seed=number
        )
        jobs.append(EngineJob(request, Future()))
        worker.post(lambda job=jobs[-1]: worker.add(job))  # type: ignore[misc]

    def more(_: "Future[Sample]") -> None:
        """The swap after the first answer, further sessions after the others, then the end."""
        done = sum(job.future.done() for job in jobs)
        if done == 1:
            worker.post(lambda: swaps.append(worker.flip(weights[1])))
        if done == len(jobs) == 6:
            worker.post(worker.end)
        elif done == len(jobs):
            ask(done, starts[3])
            jobs[done].future.add_done_callback(more)

    starts = prompts(config, 4)
    for number, prompt in enumerate(starts):
        ask(number, prompt[: 70 + 30 * number])
        jobs[number].future.add_done_callback(more)
    worker.run()
    samples = [job.future.result() for job in jobs]
    assert worker.counts["reused"] > 64, "the last prompt again"
    return samples, weights


@pytest.mark.parametrize("name", NAMES)
def test_the_worker_mixes_no_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(POLICIES[name], vocab=320)
    versions = Versions(config, tmp_path)
    here, _ = play(config, versions, torch.device("cpu"))
    assert any(len(sample.spans) > 1 for sample in here), "a swap in flight"
    with other_device.installed(monkeypatch):
        there, weights = play(config, versions, other_device.CLAIMED)
        same = [isinstance(parameter.data, other_device.Elsewhere) for parameter in weights[0].model.parameters()]
    assert all(same)
    assert [sample.ids for sample in there] == [sample.ids for sample in here]
    assert there == here
    reads = other_device.READS
    assert len([site for site in reads if site.startswith("engines/embedded")]) <= 2, (
        "ids with log-probabilities; routes"
    )


def test_the_checks_of_a_gpu_mix_no_devices_and_name_what_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (tiny.config(), POLICIES["mxfp8"], POLICIES["latent"]):
        with monkeypatch.context() as patch, other_device.installed(patch):
            assert on_device.failure(config, torch.Generator().manual_seed(0), other_device.CLAIMED) == ""
        assert on_device.failure(config, torch.Generator().manual_seed(0), torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("operators", "linear", "a product from "),
        ("operators", "rms_norm", "rms_norm of 1 rows"),
        ("batch_invariant", "swiglu", "swiglu of 1 rows"),
        ("batch_invariant", "rotate", "rotation of 1 rows"),
        ("operators", "experts", "experts of 1 tokens"),
        ("attention", "cached", "attention of "),
    ],
)
def test_a_planted_fault_is_named(module: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config()
    place = getattr(on_device, module)
    real = getattr(place, name)

    def nudged(*args: object, **more: object) -> torch.Tensor:
        out: torch.Tensor = real(*args, **more)
        return torch.nextafter(out, out + 1) if len(out) == 1 else out

    monkeypatch.setattr(place, name, nudged)
    assert on_device.failure(config, torch.Generator().manual_seed(0), torch.device("cpu")).startswith(says)


def test_a_fault_of_the_largest_tiles_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = operators.linear

    def nudged(x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
        out = real(x, weight, exact)
        return torch.nextafter(out, out + 1) if len(x) >= batch_invariant.LARGEST_ROWS else out

    monkeypatch.setattr(operators, "linear", nudged)
    config = tiny.config()
    reason = on_device.failure(config, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert reason.startswith("a product from ")


def test_a_grown_rotary_table_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(POLICIES["dense"], layers=1)
    model = Model(config, tiny.numerics(config), seed=1)
    ids = [tiny.tokens(config, length) for length in (5, 1030)]
    with torch.no_grad():
        want = [model(tokens, [len(tokens)]) for tokens in ids]
    model = Model(config, tiny.numerics(config), seed=1)
    other_device.moved(model)
    with other_device.installed(monkeypatch), torch.no_grad():
        got = [model(tokens.to(other_device.CLAIMED), [len(tokens)]) for tokens in ids]
    assert all(torch.equal(a, other_device.held(b)) for a, b in zip(want, got, strict=True))


def test_draws_of_whole_numbers_are_those_of_sums_in_float64() -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(1)) * 4
    heat = torch.tensor([1.0, 0.6, 0.0, 1.3] * 16)
    chance = torch.tensor([uniform(seed, 5) for seed in range(64)], dtype=torch.float64)
    ids, _ = draw(logits, heat, chance)
    assert torch.equal(drawn(logits, heat, chance), ids)
    alone = [drawn(logits[at : at + 1], heat[at : at + 1], chance[at : at + 1]) for at in range(64)]
    assert torch.equal(torch.cat(alone), ids)


def test_an_id_without_weight_is_never_drawn() -> None:
    logits = torch.full((2, 10), -torch.inf)
    logits[:, 3], logits[:, 7] = 0.0, 1.0
    edges = torch.tensor([1e-300, 1.0], dtype=torch.float64)
    assert drawn(logits, torch.ones(2), edges).tolist() == [3, 7]
    for seed in itertools.islice(itertools.count(), 50):
        chance = torch.full((2,), uniform(seed, 1), dtype=torch.float64)
        assert set(drawn(logits, torch.ones(2), chance).tolist()) <= {3, 7}
