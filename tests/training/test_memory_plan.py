"""The closed form against the model on the meta device, and the figures of three published shapes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from headrace.algorithms.adamw import AdamW
from headrace.cli.main import main
from headrace.kernels import expert_mlp
from headrace.messages.rollout import Span
from headrace.policy.adapters import low_rank, shape
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.layer import Chosen, Layer
from headrace.policy.layout import hugging_face
from headrace.policy.layout.activations import activation_bytes
from headrace.policy.layout.sizes import parameters
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.device import TrainerError, check_memory, layout_on
from headrace.training.figures.layout import MOMENTS, Layout, Moments, layout_of, settings
from headrace.training.gradient import Recipe, accumulate
from headrace.training.memory_plan import GIB, attention_of, fitting, moment_bytes, plan
from headrace.training.schedule import optimizer_settings
from headrace.training.state import TrainerState
from tests.support.live_memory import live_bytes
from tests.support.world import CONFIG, POLICY

QWEN = {
    "0.6B": PolicyConfig(
        dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, experts=0, top_k=0, expert_dim=3072, vocab=151936,
        dtype="bfloat16", tied=True,
    ),
    "4B": PolicyConfig(
        dim=2560, layers=36, heads=32, kv_heads=8, head_dim=128, experts=0, top_k=0, expert_dim=9728, vocab=151936,
        dtype="bfloat16", tied=True,
    ),
    "30B-A3B": PolicyConfig(
        dim=2048, layers=48, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8, expert_dim=768, vocab=151936,
        dtype="bfloat16",
    ),
}  # fmt: skip
LATENT = PolicyConfig(
    dim=2048, layers=4, heads=16, kv_heads=16, head_dim=192, experts=64, top_k=6, expert_dim=1408, vocab=1000,
    dtype="bfloat16", scores="sigmoid", shared_experts=2, dense_layers=1,
    latent=Latent(q_rank=512, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip
BIASED = msgspec.structs.replace(QWEN["0.6B"], qkv_bias=True, qk_norm=False, out_bias=True, tied=False)
ADAPTED = msgspec.structs.replace(QWEN["0.6B"], adapter=shape.resolved(QWEN["0.6B"], 64, 32.0, ()))
SHAPES = {**QWEN, "latent": LATENT, "biased": BIASED, "float32": POLICY, "adapted": ADAPTED}


class Fused(torch.autograd.Function):
    """The tensors that a fused attention keeps: q, k, v, its output and a log-sum-exp per head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out


def fused(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """An `Attend`."""
    out: Tensor = Fused.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


def turned(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Its output by heads is turned into one by tokens, as context parallelism does."""
    return fused(q, k, v, sinks).clone()


def saved(config: PolicyConfig, layer: Layer, tokens: int, patch: pytest.MonkeyPatch, context: int) -> int:
    """Bytes per token that a layer's autograd graph saves."""

    def balanced(experts: Tensor, count: int, pad: int, least: int = 1) -> expert_mlp.RowLayout:
        rows = experts.numel()
        each = rows // count
        index = torch.empty(rows, dtype=torch.int64, device=experts.device)
        return expert_mlp.RowLayout([(e, e * each, (e + 1) * each) for e in range(count)], rows, index, index)

    patch.setattr(expert_mlp, "plan", balanced)
    truth: Callable[[Tensor], bool] = torch.Tensor.__bool__
    patch.setattr(torch.Tensor, "__bool__", lambda t: False if t.device.type == "meta" else truth(t))
    dtype = config.torch_dtype
    with torch.device("meta"):
        x = torch.empty(tokens, config.dim, dtype=dtype, requires_grad=True)
        half = (config.latent.rope_dim if config.latent else config.head_dim) // 2
        cos = torch.empty(tokens, 1, half, dtype=dtype)
        replay = torch.empty(tokens, config.top_k, dtype=torch.int64) if config.experts else None
    input_storages = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    input_storages |= {tensor.untyped_storage()._cdata for tensor in (cos, replay) if tensor is not None}
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in input_storages:
            storages[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, cos, cos, fused if context == 1 else turned, 1, replay, Chosen())
    return sum(size for size, _ in storages.values()) // tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_closed_form_is_within_five_percent_of_the_meta_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES[name]
    model = Model(config, Numerics(exact=False, row_pad=1, reason="", fingerprint=""), seed=None, device="meta")
    assert parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    trained = (low_rank.is_adapter(name) if config.adapter else p.requires_grad for name, p in model.named_parameters())
    frozen = sum(p.numel() for p, is_trained in zip(model.parameters(), trained, strict=True) if not is_trained)
    assert parameters(config).frozen == frozen
    for index in {0, config.layers - 1}:
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        for context in (1, 2):
            told = activation_bytes(config, config.sparse(index), context)
            assert told == pytest.approx(saved(config, layer, 16384, monkeypatch, context), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_moments_are_counted_by_the_shapes_of_the_parameters(name: str) -> None:
    config = SHAPES[name]
    model = Model(config, Numerics(exact=False, row_pad=1, reason="", fingerprint=""), seed=None, device="meta")
    coded, whole = 0, 0
    for parameter_name, parameter in model.named_parameters():
        if low_rank.is_adapter(parameter_name) if config.adapter else parameter.requires_grad:
            whole += parameter.numel()
            rows = parameter.numel() // parameter.shape[-1]
            coded += parameter.numel() + 4 * rows * -(-parameter.shape[-1] // 256) if parameter.dim() > 1 else 0
            coded += 4 * parameter.numel() if parameter.dim() == 1 else 0
    assert [moment_bytes(config, each) for each in (4, 2, 1)] == [8 * whole, 4 * whole, 2 * coded]


GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
"""The fields of the published config.json that headrace reads; it names no dtype."""


def test_gpt_oss_20b_is_planned_from_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = hugging_face.read(tmp_path)
    assert config.dtype == "bfloat16" and parameters(config).total == pytest.approx(20.9e9, rel=0.005)
    short, long = (plan(config, Layout(tokens=tokens)).activations / tokens for tokens in (1024, 8192))
    blocks = 12 * (8192 - 1024) / 64 / 2  # of the twelve layers without a window, whose queries see half of all blocks
    assert long - short == pytest.approx(blocks * 64 * 64 * 6, rel=0.05)
    assert main(["trainer", "plan", str(tmp_path), "--gpu-gib", "256"]) == 1
    assert "20.91 G parameters" in capsys.readouterr().out
    assert main(["trainer", "plan", str(tmp_path), "--gpus", "8"]) == 2
    assert "gpt_oss is trained on a CPU by one process" in capsys.readouterr().err


def test_published_shapes_on_eight_devices_of_80_gib() -> None:
    long = Layout(devices=8, tokens=65536, learning_rate=1e-6)
    for name, total in (("0.6B", 0.596e9), ("4B", 4.02e9), ("30B-A3B", 30.5e9)):
        assert parameters(QWEN[name]).total == pytest.approx(total, rel=0.01)
        layout = fitting(QWEN[name], long, 80 * GIB)
        assert layout is not None and layout.recompute, name
        assert plan(QWEN[name], layout).total <= 0.8 * 80 * GIB
        chosen = settings(layout)
    recipe = {"trainer.context_ranks": 2, "numerics.recompute": True, "algorithm.moments": "bfloat16"}
    assert recipe.items() <= chosen.items(), "what a user sets for 30B-A3B"
    assert fitting(QWEN["30B-A3B"], long._replace(devices=1), 80 * GIB) is None
    with pytest.raises(ValueError, match="does not divide 4 key-value heads"):
        plan(QWEN["30B-A3B"], long._replace(context=8))


def test_ranks_that_share_tokens_hold_their_part_of_the_activations() -> None:
    both = msgspec.structs.replace(CONFIG.trainer, ranks=2, micro_tokens=65536)
    apart, together = (
        plan(QWEN["0.6B"], layout_of(msgspec.structs.replace(CONFIG, trainer=trainer)))
        for trainer in (both, msgspec.structs.replace(both, context_ranks=2))
    )
    assert together.activations == pytest.approx(apart.activations / 2, rel=0.1)
    assert together.activations > apart.activations / 2, "attention's output is kept by heads and by tokens"
    assert together.weights == apart.weights


def test_the_trainer_refuses_a_plan_that_does_not_fit() -> None:
    layout = layout_of(CONFIG)
    check_memory(POLICY, layout, 1 * GIB, 0)
    with pytest.raises(TrainerError, match=r"needs .* GiB and its device has 16.0 GiB free"):
        check_memory(QWEN["4B"], layout, 16 * GIB, 0)


def test_owned_experts_are_not_gathered_and_one_copy_of_them_is_shared() -> None:
    layout = Layout(devices=8, context=4, tokens=65536, recompute=True)
    sharded, owned = (plan(QWEN["30B-A3B"], layout._replace(expert_ranks=ranks)) for ranks in (1, 8))
    assert owned.masters == sharded.masters and owned.gathered < sharded.gathered
    kept = plan(QWEN["30B-A3B"], layout._replace(expert_ranks=8, recompute=False)).gathered - owned.gathered
    assert kept == pytest.approx(2 * parameters(QWEN["30B-A3B"]).experts / 8 * 47 / 48, rel=1e-6)
    for config, ranks, said in ((QWEN["4B"], 8, "experts"), (QWEN["30B-A3B"], 3, "do not divide 8 devices")):
        with pytest.raises(ValueError, match=said):
            plan(config, Layout(devices=8, expert_ranks=ranks))


def test_offloading_moves_masters_and_moments_to_the_host() -> None:
    for devices in (1, 8):
        layout = Layout(devices=devices, tokens=4096, snapshots=1)
        here, there = plan(QWEN["4B"], layout), plan(QWEN["4B"], layout._replace(offload=True))
        assert there.masters + there.moments + there.snapshots + there.update == 0
        assert there.host.moments == here.moments and there.host.snapshots == here.snapshots
        assert there.host.masters == pytest.approx(4 * parameters(QWEN["4B"]).total / devices, rel=1e-6)
        assert here.total - there.total >= here.masters + here.moments
        assert here.host.total == 0
    section = msgspec.structs.replace(CONFIG.trainer, offload="optimizer")
    config = msgspec.structs.replace(CONFIG, trainer=section)
    assert layout_of(config).offload
    assert not layout_on(config, torch.device("cpu")).offload, "its memory is the host's"
    layout = layout_on(config, torch.device("cuda"))
    needed = plan(QWEN["4B"], layout)
    check_memory(QWEN["4B"], layout, needed.total, needed.host.total)
    with pytest.raises(TrainerError, match=r"\[trainer\] offload: .* of the host's memory .* 16.0 GiB are free"):
        check_memory(QWEN["4B"], layout, needed.total, 16 * GIB)


def test_the_command_prints_the_hosts_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    file = str(tmp_path / "run.toml")
    assert main(["trainer", "plan", file, "--gpus", "2", "--moments", "eight_bit", "--offload", "optimizer"]) == 0
    shown = capsys.readouterr().out
    assert "algorithm.moments = eight_bit" in shown and "trainer.offload = optimizer" in shown
    assert "GiB for 2 processes, each with" in shown
    assert main(["trainer", "plan", file]) == 0
    assert "in the host's memory" not in capsys.readouterr().out


def test_the_command_needs_no_torch(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    code = (
        "import sys; from headrace.cli.main import main; "
        "code = main(['trainer', 'plan', sys.argv[1], '--gpus', '8', '--gpu-gib', sys.argv[2]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for gib, expected, says in (("80", 0, "fits 8 x 80 GiB"), ("0.01", 1, "does not fit 8 x 0.01 GiB")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run.toml"), gib], capture_output=True, text=True
        )
        assert done.returncode == expected, done.stderr
        assert says in done.stdout and "activations" in done.stdout


OPTIMIZED = PolicyConfig(
    dim=264, layers=2, heads=4, kv_heads=2, head_dim=64, experts=4, top_k=2, expert_dim=320, vocab=340, dtype="bfloat16"
)


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_plan_of_an_update_is_within_five_percent_of_its_live_tensors(moments: Moments) -> None:
    settings = optimizer_settings(msgspec.structs.replace(CONFIG.algorithm, moments=moments))
    model = Model(OPTIMIZED, probe(OPTIMIZED, exact=False), seed=1)
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for master in masters.values():
        master.grad = torch.randn_like(master)
    optimizer = AdamW(masters, settings)

    def update() -> None:
        for master in masters.values():
            optimizer.step(1e-3, master)

    update()  # makes the moments
    held = sum(tensor.nbytes for each in optimizer.moments.values() for tensor in each.tensors("x").values())
    told = plan(OPTIMIZED, Layout(moment_bytes=MOMENTS[moments]))
    assert told.moments == held
    live = live_bytes(update)
    print(f"{moments}: {held} bytes of moments, {live} alive in an update, {told.update} planned")
    assert told.moments + told.update == pytest.approx(held + live, rel=0.05)


LIVE = {
    "mixture": PolicyConfig(
        dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_dim=64, vocab=340
    ),
    "wide experts": PolicyConfig(
        dim=32, layers=3, heads=2, kv_heads=1, head_dim=16, experts=8, top_k=4, expert_dim=96, vocab=340
    ),
    "dense": PolicyConfig(
        dim=64, layers=3, heads=4, kv_heads=2, head_dim=16, experts=0, top_k=0, expert_dim=192, vocab=340
    ),
}


MODES = {
    **{name: (name, True, "float32") for name in LIVE},
    **{f"{name}, ordinary": (name, False, "float32") for name in LIVE},
    "dense, ordinary, bfloat16": ("dense", False, "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_the_plan_of_a_micro_batch_is_within_five_percent_of_its_live_tensors(name: str) -> None:
    shape_name, exact, dtype = MODES[name]
    config, length, count = msgspec.structs.replace(LIVE[shape_name], dtype=dtype), 256, 16
    draw = torch.Generator().manual_seed(1)
    segments = []
    for index in range(count):
        experts = torch.rand(length, config.layers, config.experts, generator=draw).argsort(-1)[..., : config.top_k]
        segments.append(
            Segment(
                trajectory=f"t{index}",
                ids=torch.randint(0, 300, (length,), generator=draw),
                positions=torch.arange(length - 8, length),
                targets=torch.randint(0, 300, (8,), generator=draw),
                behaviour=torch.full((8,), -5.8),
                versions=torch.zeros(8, dtype=torch.int64),
                routed=experts.to(torch.uint8) if config.experts else None,
                spans=(Span(0, length, 0),),
                advantage=(-1.0) ** index,
                temperature=1.0,
                index=index,
            )
        )
    batch = Batch(tuple(segments), count, (1.0, 0.0) * (count // 2), count // 2, ("g",), frozenset({"f"}))
    state = TrainerState(Model(config, probe(config, exact=exact), seed=1))
    assert state.model.numerics.exact == exact
    accumulate(state, batch, Recipe(CONFIG.algorithm, length * count))  # fills caches
    state.zero_grad()
    live = live_bytes(lambda: accumulate(state, batch, Recipe(CONFIG.algorithm, length * count)))
    told = plan(config, Layout(tokens=length * count, exact=exact, cpu=True))
    print(f"{name}: {live} bytes alive, {told.backward} planned, {told.temporary} of them temporary")
    assert told.backward == pytest.approx(live, rel=0.05)


def test_the_plan_is_that_of_the_configurations_mode_and_device() -> None:
    ordinary = msgspec.structs.replace(CONFIG, engine=msgspec.structs.replace(CONFIG.engine, exact=False))
    layouts = {name: layout_on(each, torch.device("cuda")) for name, each in (("e", CONFIG), ("o", ordinary))}
    assert [layout.exact for layout in layouts.values()] == [True, False]
    assert plan(QWEN["0.6B"], layouts["o"]) == plan(QWEN["0.6B"], layouts["e"]), "varlen_attn keeps what Triton's does"
    assert attention_of(QWEN["0.6B"], layouts["o"]) == ("fused", "")
    wide = msgspec.structs.replace(QWEN["0.6B"], dtype="float32")
    more = plan(wide, layouts["o"]).activations - plan(wide, layouts["e"]).activations
    assert more == layouts["o"].inputs * 28 * 4 * 16 * 128, "torch's own output is kept beside the packed one"
    assert attention_of(wide, layouts["o"]) == ("padded", "varlen_attn takes bfloat16, not float32")
    assert attention_of(QWEN["0.6B"], layout_on(ordinary, torch.device("cpu")))[0] == "products"
    assert attention_of(QWEN["0.6B"], layout_on(CONFIG, torch.device("cpu"))) == ("blocks", "")


def test_the_command_says_how_ordinary_mode_attends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    for exact, said in (("true", ""), ("false", "attention padded: varlen_attn takes bfloat16, not float32")):
        assert main(["trainer", "plan", str(tmp_path / "run.toml"), "--set", f"engine.exact={exact}"]) == 0
        assert ("ordinary mode" in (shown := capsys.readouterr().out)) == bool(said) and said in shown


def test_nodes_hold_copies() -> None:
    policy, layout = QWEN["30B-A3B"], Layout(devices=8, context=4, tokens=65536, recompute=True)
    assert plan(policy, layout._replace(nodes=2)) == plan(policy, layout), "another node makes no shard smaller"
    keys = settings(layout._replace(nodes=2))
    assert (keys["trainer.ranks"], keys["trainer.nodes"]) == (16, 2)
    section = msgspec.structs.replace(CONFIG.trainer, ranks=16, nodes=2, rendezvous="node0:29500")
    made = layout_of(msgspec.structs.replace(CONFIG, trainer=section))
    assert (made.devices, made.nodes) == (8, 2)


def test_a_rebuilt_version_of_one_process_holds_what_changed_and_is_in_no_entry() -> None:
    layout = Layout(versions=2, learning_rate=1e-6)
    assert plan(QWEN["0.6B"], layout).versions == 2 * 2 * parameters(QWEN["0.6B"]).total
    assert plan(ADAPTED, layout).versions == 0, "all adapters change: their entries hold the tensors"
    assert plan(POLICY, layout).versions == 0, "float32 the same"
