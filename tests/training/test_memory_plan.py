"""The plan of published shapes and layouts; `test_memory_steps` compares it with whole steps."""

import time
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.cli.main import main
from headrace.config import Config, Curriculum, Limits, Mesh, Policy
from headrace.config import Trainer as TrainerSection
from headrace.policy.adapters import shape
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.policy.layout.sizes import parameters
from headrace.training.device import TrainerError, check_memory, layout_on
from headrace.training.figures.layout import Layout, layout_of, settings
from headrace.training.memory_plan import GIB, attention_refusal, fitting, plan, rough
from headrace.training.planned import measured
from headrace.training.trainer import PolicyTrainer
from tests.support import live_memory
from tests.support.world import CONFIG, POLICY, TOKENIZER

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
SHALLOW = msgspec.structs.replace(QWEN["30B-A3B"], layers=3)
ADAPTED = msgspec.structs.replace(QWEN["0.6B"], adapter=shape.resolved(QWEN["0.6B"], 64, 32.0, ()))


@pytest.mark.slow
def test_published_shapes_on_eight_devices_of_80_gib() -> None:
    long = Layout(devices=8, tokens=65536, learning_rate=1e-6)
    for name, total in (("0.6B", 0.596e9), ("4B", 4.02e9), ("30B-A3B", 30.5e9)):
        assert parameters(QWEN[name]).total == pytest.approx(total, rel=0.01)
        layout = fitting(QWEN[name], long, 80 * GIB)
        assert layout is not None and layout.recompute, name
        assert plan(QWEN[name], layout).total <= 0.8 * 80 * GIB
        chosen = settings(layout)
    recipe = {"trainer.mesh.context": 4, "numerics.recompute": True, "algorithm.moments": "bfloat16"}
    assert recipe.items() <= chosen.items(), "what a user sets for 30B-A3B"
    assert fitting(QWEN["30B-A3B"], long._replace(devices=1), 80 * GIB) is None
    with pytest.raises(ValueError, match="does not divide 4 key-value heads"):
        plan(QWEN["30B-A3B"], long._replace(context=8))


@pytest.mark.slow
def test_ranks_that_share_tokens_hold_their_part_of_the_activations() -> None:
    apart, together = (plan(QWEN["0.6B"], Layout(devices=2, tokens=65536, context=n)) for n in (1, 2))
    assert apart.passes / 2 < together.passes < 0.6 * apart.passes
    assert together.weights == apart.weights


def test_the_trainer_refuses_a_plan_that_does_not_fit() -> None:
    layout = layout_of(CONFIG)
    needed = plan(POLICY, layout)
    check_memory(needed, layout, 1 * GIB, 0)
    with pytest.raises(TrainerError, match=r"needs 17.0 GiB and its device has 16.0 GiB free"):
        check_memory(needed._replace(weights=17 * GIB), layout, 16 * GIB, 0)


@pytest.mark.slow
def test_owned_experts_are_not_gathered() -> None:
    layout = Layout(devices=8, context=4, tokens=65536, recompute=True)
    sharded, owned = (plan(SHALLOW, layout._replace(expert_ranks=ranks)) for ranks in (1, 8))
    assert owned.weights == sharded.weights and owned.scoring < sharded.scoring
    for config, ranks, said in ((QWEN["4B"], 8, "do not divide 0 experts"), (SHALLOW, 3, "do not divide 8 devices")):
        with pytest.raises(ValueError, match=said):
            plan(config, Layout(devices=8, expert_ranks=ranks))


@pytest.mark.slow
def test_uneven_routing_fills_the_owner_of_a_popular_expert() -> None:
    layout = Layout(devices=8, tokens=8192, expert_ranks=8)
    even, uneven = (plan(SHALLOW, layout._replace(skew=skew)) for skew in (1.0, 8.0))
    assert uneven.passes > 1.5 * even.passes
    routes = measured.routes(SHALLOW, 8192, 4.0)
    assert routes is not None and routes.shape == (8192, 3, 8)
    rows = routes[:, 0].flatten().to(torch.int64).bincount(minlength=128)
    assert rows.sum() == 8192 * 8 and int(rows.max()) == pytest.approx(4 * 8192 * 8 / 128, rel=0.01)


DEEP = {
    "dense": PolicyConfig(
        dim=64, layers=9, heads=4, kv_heads=2, head_dim=16, experts=0, top_k=0, expert_dim=192, vocab=340
    ),
    "mixture": PolicyConfig(
        dim=64, layers=9, heads=4, kv_heads=4, head_dim=24, experts=4, top_k=2, expert_dim=64, vocab=340,
        dtype="bfloat16", scores="sigmoid", shared_experts=1, dense_layers=1,
        latent=Latent(q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", DEEP)
def test_a_policy_continued_from_two_depths_has_the_bytes_of_all_its_layers(
    name: str, recompute: bool, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(devices=devices, tokens=512, recompute=recompute, cpu=True)
    continued = measured.passes(DEEP[name], layout), measured.state(DEEP[name], layout)
    monkeypatch.setattr(measured, "ENDS", 5)  # then nine layers are measured as they are
    whole = measured.passes.__wrapped__(DEEP[name], layout), measured.state.__wrapped__(DEEP[name], layout)
    assert continued[1] == whole[1] and continued[0].gradients == whole[0].gradients
    assert max(continued[0].backward.values()) == max(whole[0].backward.values())


@pytest.mark.slow
def test_thirty_billion_parameters_on_64_ranks_are_planned_in_a_minute() -> None:
    began = time.process_time()
    told = plan(QWEN["30B-A3B"], Layout(devices=64, tokens=32768, recompute=True, exact=False))
    assert time.process_time() - began < 60.0, "of this process: others may use the machine"
    assert told.weights == pytest.approx(4 * parameters(QWEN["30B-A3B"]).total / 64, rel=0.01)


@pytest.mark.gpu
def test_the_plan_is_within_five_percent_of_what_a_gpu_allocates(tmp_path: Path) -> None:
    section = msgspec.structs.replace(CONFIG.trainer, device="cuda", rescore=0)
    policy = Policy(dim=512, layers=6, experts=0, top_k=0, expert_dim=1536, vocab=8192, dtype="bfloat16", heads=8,
                    kv_heads=4, head_dim=64)  # fmt: skip
    limits = Limits(max_turn_tokens=16, context_tokens=4096, reserve_tokens=64)
    curriculum = msgspec.structs.replace(CONFIG.curriculum, group_size=4, groups_per_step=1)
    config = msgspec.structs.replace(CONFIG, trainer=section, policy=policy, limits=limits, curriculum=curriculum)
    trainer = PolicyTrainer.prepare(config, tmp_path, tokenizer_json=TOKENIZER, traces=tuple)
    outcome = None
    for number in range(3):
        outcome = trainer.step(*live_memory.records(config, number, 4096))
        assert not outcome.failed, outcome.detail
    assert outcome is not None and outcome.planned_bytes == pytest.approx(outcome.peak_bytes, rel=0.05)


def test_offloading_moves_masters_and_moments_to_the_host() -> None:
    policy = msgspec.structs.replace(QWEN["4B"], layers=2)
    for devices in (1, 8):
        layout = Layout(devices=devices, tokens=4096, snapshots=1)
        here, there = plan(policy, layout), plan(policy, layout._replace(offload=True))
        assert there.masters + there.moments + there.snapshots + there.update == 0
        assert there.host.moments == here.moments
        assert there.host.snapshots == pytest.approx(here.snapshots, rel=1e-4), "a GPU rounds each up"
        assert there.host.masters == pytest.approx(4 * parameters(policy).total / devices, rel=1e-6)
        assert here.total - there.total >= here.masters + here.moments
        assert here.host.total == 0
    section = msgspec.structs.replace(CONFIG.trainer, offload="optimizer")
    config = msgspec.structs.replace(CONFIG, trainer=section)
    assert layout_of(config).offload
    assert not layout_on(config, torch.device("cpu")).offload, "its memory is the host's"
    layout = layout_on(config, torch.device("cuda"))
    check_memory(there, layout, there.total, there.host.total)
    with pytest.raises(TrainerError, match=r"\[trainer\] offload: .* of the host's memory .* 0.2 GiB are free"):
        check_memory(there, layout, there.total, GIB // 4)


def test_the_command_prints_the_hosts_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    file = str(tmp_path / "run.toml")
    changes = ("--set", "algorithm.moments=eight_bit", "--set", "trainer.offload=optimizer")
    assert main(["trainer", "plan", file, "--gpus", "2", *changes]) == 0
    shown = capsys.readouterr().out
    assert "algorithm.moments = eight_bit" in shown and "trainer.offload = optimizer" in shown
    assert "GiB for 2 processes, each with" in shown
    assert main(["trainer", "plan", file]) == 0
    assert "in the host's memory" not in capsys.readouterr().out


def test_the_command_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    for gib, expected, says in (("80", 0, "fits 8 x 80 GiB"), ("0.01", 1, "does not fit 8 x 0.01 GiB")):
        assert main(["trainer", "plan", str(tmp_path / "run.toml"), "--gpus", "8", "--gpu-gib", gib]) == expected
        shown = capsys.readouterr().out
        assert says in shown and "passes" in shown


@pytest.mark.slow
def test_the_plan_is_that_of_the_configurations_mode_and_device() -> None:
    ordinary = msgspec.structs.replace(CONFIG, engine=msgspec.structs.replace(CONFIG.engine, exact=False))
    layouts = {name: layout_on(each, torch.device("cuda")) for name, each in (("e", CONFIG), ("o", ordinary))}
    assert [layout.exact for layout in layouts.values()] == [True, False]
    assert attention_refusal(QWEN["0.6B"], layouts["o"]) == attention_refusal(POLICY, layouts["e"]) == ""
    wide = msgspec.structs.replace(QWEN["0.6B"], dtype="float32")
    more = plan(wide, layouts["o"]).passes - plan(wide, layouts["e"]).passes
    assert more >= layouts["o"].inputs * 28 * 4 * 16 * 128, "torch's own output is kept beside the packed one"
    assert attention_refusal(wide, layouts["o"]) == "varlen_attn takes bfloat16, not float32"


def test_the_command_says_how_ordinary_mode_attends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[policy]\ndim = 64\n")
    for exact, said in (("true", ""), ("false", "attention: varlen_attn takes bfloat16, not float32")):
        assert main(["trainer", "plan", str(tmp_path / "run.toml"), "--set", f"engine.exact={exact}"]) == 0
        assert ("ordinary mode" in (shown := capsys.readouterr().out)) == bool(said) and said in shown


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "shape", [{}, {"layers": 12, "dim": 256}, {"experts": 0, "top_k": 0, "expert_dim": 512}, {"vocab": 20_000}]
)
def test_the_bound_in_closed_form_is_above_the_plan(exact: bool, shape: dict[str, int]) -> None:
    new = hugging_face.from_section(Policy())
    policy = msgspec.structs.replace(new, **shape)
    layout = Layout(tokens=4096, longest=6000, versions=3, snapshots=3, reference=True, exact=exact, cpu=True)
    assert rough(policy, layout) > plan(policy, layout).total


def test_nodes_hold_copies() -> None:
    layout = Layout(devices=8, context=4, tokens=65536, recompute=True)
    alone, two = plan(SHALLOW, layout), plan(SHALLOW, layout._replace(copies=2))
    assert two.held == pytest.approx(alone.held, rel=1e-3), "another node makes no shard smaller"
    assert alone.passes < two.passes < 1.05 * alone.passes, "sums over nodes are held until they have arrived"
    keys = settings(layout._replace(copies=2, nodes=2))
    assert (keys["trainer.mesh.shard"], keys["trainer.mesh.replicate"], keys["trainer.node_ranks"]) == (8, 2, 8)
    section = msgspec.structs.replace(
        CONFIG.trainer, mesh=Mesh(replicate=2, shard=8), node_ranks=8, rendezvous="node0:29500"
    )
    made = layout_of(msgspec.structs.replace(CONFIG, trainer=section))
    assert (made.devices, made.copies, made.nodes) == (8, 2, 2)


@pytest.mark.slow
def test_a_rebuilt_version_of_one_process_holds_what_changed_and_is_in_no_entry() -> None:
    layout = Layout(versions=2, learning_rate=1e-6)
    assert plan(QWEN["0.6B"], layout).versions == 2 * 2 * parameters(QWEN["0.6B"]).total
    assert plan(ADAPTED, layout).versions == 0, "all adapters change: their entries hold the tensors"
    assert plan(POLICY, layout).versions == 0, "float32 the same"


def test_a_trainer_that_scores_nothing_again_plans_nothing_for_it() -> None:
    settings = Config(trainer=TrainerSection(rescore=0), curriculum=Curriculum(staleness=4))
    scored = layout_of(msgspec.structs.replace(settings, trainer=TrainerSection(rescore=8)))
    layout = layout_of(settings)
    before, after = plan(POLICY, scored), plan(POLICY, layout)
    assert before.undo > 0 and before.scoring > 0
    assert (after.undo, after.versions, after.scoring) == (0, 0, 0)
    assert before._replace(undo=0, versions=0, scoring=0) == after
    few = msgspec.structs.replace(QWEN["0.6B"], layers=2)
    ranks = plan(few, scored._replace(devices=2)), plan(few, layout._replace(devices=2))
    assert ranks[0].versions > ranks[1].versions == 0, "nor masters set aside"
