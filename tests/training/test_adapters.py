"""Low-rank adapters through trainer, engine and files: tiny deltas, the sampler's own bits, the merged policy."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config import ConfigError, parse
from headrace.config.training import Lora
from headrace.engines.base import SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.adapters import low_rank, shape
from headrace.policy.config import CheckpointError, Latent
from headrace.policy.layout import hugging_face, sizes
from headrace.policy.model import Model
from headrace.weights import tensor_state
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.snapshot import Snapshot
from tests.support import tiny, world
from tests.training.test_trainer import advance, changed, prepare

LORA = {"lora": Lora(rank=4, alpha=8.0)}
ADAPTED = changed(trainer=LORA, mid_training={"tokens": 300, "batch_tokens": 100})


def wire_bytes(target: Path, base: Path) -> int:
    return sum(len(piece) for piece in Encoding(Snapshot(target), Snapshot(base)).chunks())


def test_adapters_alone_are_trained_published_and_resumed_and_an_engine_samples_what_the_trainer_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = prepare(tmp_path / "a", ADAPTED)
    monkeypatch.setattr(world, "NUMERICS", trainer.numerics)
    base = Model(world.POLICY, trainer.numerics, seed=ADAPTED.run.seed).state()
    first = trainer.state.published()
    assert set(first) - set(base) == {name for name in first if low_rank.is_published(name)}
    assert all(torch.equal(first[name], value) for name, value in base.items()), "mid-training changed the base"
    assert any(bool(value.any()) for name, value in first.items() if name.endswith(shape.B)), "and not the adapter"

    before = trainer.publish(tmp_path).durable.result()
    outcomes = advance(trainer, 1)
    trainer.save({})
    kept_names = [
        name for name in tensor_state.read(tmp_path / "a" / "checkpoint.safetensors") if name.startswith("kept.")
    ]
    assert kept_names and all(low_rank.is_published(name) for name in kept_names), (
        "a kept version holds what can differ"
    )
    outcomes += advance(trainer, 1)
    assert all(o.exact and not o.failed and o.max_abs_dlp == 0.0 and o.rescored_tokens for o in outcomes)
    resumed = prepare(tmp_path / "a", ADAPTED)
    assert [o.state_hash for o in advance(resumed, 1)] == [outcomes[1].state_hash]
    after = trainer.publish(tmp_path).durable.result()
    adapter = 4 * shape.parameters(trainer.state.model.config)
    assert 0 < wire_bytes(after, before) < adapter + 2000 < after.stat().st_size / 3

    config = hugging_face.read(trainer.policy_folder)

    async def sampled() -> tuple[list[int], list[float]]:
        engine = EmbeddedEngine(config, trainer.numerics)
        try:
            await engine.load(2, str(after), outcomes[1].state_hash)
            sampling = Sampling(max_turn_tokens=9)
            request = SampleRequest(
                session="s", ids=(1, 10, 2), policy=PolicyRef(), sampling=sampling, stop_ids=(), seed=5
            )
            made = await engine.sample(request)
            return list(made.ids), list(made.logprobs)
        finally:
            await engine.stop()

    ids, logprobs = asyncio.run(sampled())
    whole = torch.tensor([1, 10, 2, *ids])
    with torch.no_grad():
        model = trainer.state.model
        logp, _ = model.selected_logprobs(model(whole, [len(whole)])[2:-1], whole[3:])
    assert logp.tolist() == logprobs


@pytest.mark.parametrize("latent", [False, True])
def test_a_merged_policy_computes_what_the_adapted_one_does(latent: bool) -> None:
    plain = tiny.config(experts=0, top_k=0)
    if latent:
        heads = Latent(q_rank=24, kv_rank=16, nope_dim=24, rope_dim=8, value_dim=16)
        plain = msgspec.structs.replace(plain, kv_heads=3, latent=heads)
    config = msgspec.structs.replace(plain, adapter=shape.resolved(plain, 4, 8.0, ()))
    model = tiny.model(config, exact=False)
    for name, parameter in model.named_parameters():
        if low_rank.is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.1)
    assert config.adapter is not None and len(config.adapter.targets) == (8 if latent else 7)
    counted = sizes.parameters(config)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.total - sizes.parameters(plain).total == shape.parameters(config)
    merged = Model(plain, model.numerics, seed=None)
    bare = Model(plain, model.numerics, seed=None)
    merged.load_state(low_rank.merge(config.adapter, model.state()))
    bare.load_state({name: value for name, value in model.state().items() if not low_rank.is_published(name)})
    ids = tiny.tokens(config, 40)
    with torch.no_grad():
        want, got, without = (m.logits(m(ids, [40])) for m in (model, merged, bare))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert (without - want).abs().max() > 0.05


def test_what_adapters_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"line 2: trainer\.lora\.rank.*<= 1024"):
        parse("[trainer.lora]\nrank = 4000\n")
    with pytest.raises(CheckpointError, match=r"\[trainer.lora\] targets.*'down_proj': adapters of experts"):
        hugging_face.of_run(parse("[trainer.lora]\nrank = 4\ntargets = ['down_proj']\n"))
    with pytest.raises(CheckpointError, match=r"got 'kv_b_proj': the policy has no such one"):
        hugging_face.of_run(parse("[trainer.lora]\nrank = 4\ntargets = ['kv_b_proj']\n"))
