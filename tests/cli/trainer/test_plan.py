"""`headrace trainer plan` for runs, and for the published config.json of three policies."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.support.paths import ROOT

SHAPES = ROOT / "tests" / "training" / "configs"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["trainer", "plan", *arguments])
    return code, capsys.readouterr().out


def run_toml(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(f"[policy]\ndim = 64\n{text}")
    return str(folder / "run.toml")


TOKENS = ("--set", "trainer.micro_tokens=65536")


def total(shown: str) -> float:
    """GiB on each device."""
    (line,) = [line for line in shown.splitlines() if line.split()[0] == "total"][:1]
    return float(line.split()[1])


def test_a_runs_own_ranks_nodes_and_device_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_toml(tmp_path, "[trainer.mesh]\nshard = 8\n")
    _, shown = planned(capsys, file)
    assert "trainer.mesh.shard = 8," in shown and "fits 8 x 80 GiB" in shown
    assert "trainer.mesh.shard = 2," in planned(capsys, file, "--gpus", "2")[1], "the option replaces the file's"
    file = run_toml(tmp_path, '[trainer]\nmesh.shard = 16\nnode_ranks = 8\nrendezvous = "node0:29500"\n')
    assert "fits 2 nodes of 8 x 80 GiB" in planned(capsys, file)[1]
    file = run_toml(tmp_path, '[trainer]\ndevice = "cpu"\noffload = "optimizer"\n[engine]\nexact = false\n')
    _, shown = planned(capsys, file)
    assert "attention: varlen_attn runs on CUDA" in shown, shown
    assert "in the host's memory" not in shown, "a CPU's memory is the host's"


@pytest.mark.slow
def test_the_longest_sequence_decides_where_it_is_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_toml(tmp_path, "")
    short, long = (
        planned(capsys, file, "--set", f"limits.context_tokens={tokens}", "--set", "limits.reserve_tokens=128")[1]
        for tokens in (4096, 65536)
    )
    assert "micro-batches of up to 8192 inputs\n" in short
    assert "micro-batches of up to 65536 inputs: the longest sequence" in long
    assert total(long) > 3 * total(short)


ONE_EACH = "trainer.mesh.context = 1, numerics.recompute = true, algorithm.moments = float32"
FOUR_EACH = "trainer.mesh.context = 4, numerics.recompute = true, algorithm.moments = bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "before", "gib", "recipe"),
    [
        ("Qwen3-0.6B", "0.60 G", 85.05, 8.94, ONE_EACH),
        ("Qwen3-4B", "4.02 G", 258.43, 30.04, ONE_EACH),
        ("Qwen3-30B-A3B", "30.53 G", 279.23, 61.51, FOUR_EACH),
    ],
)
def test_three_published_policies_fit_eight_gpus_at_64k(
    name: str, count: str, before: float, gib: float, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """before, gib: GiB of a device as the policy is, and with the recipe, up to what another release of torch
    allocates."""
    arguments = [str(SHAPES / name), "--gpus", "8", "--gpu-gib", "80", *TOKENS]
    code, shown = planned(capsys, *arguments)
    assert code == 1 and shown.startswith(f"{count} parameters") and "does not fit 8 x 80 GiB" in shown
    assert total(shown) == pytest.approx(before, rel=0.01)
    (fix,) = [line for line in shown.splitlines() if line.startswith("fits with")]
    assert recipe in fix and "trainer.offload = none" in fix
    keys = dict(pair.split(" = ") for pair in recipe.split(", "))
    arguments += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    arguments += ["--set", "trainer.mesh.shard=8"]
    code, shown = planned(capsys, *arguments)
    assert code == 0 and "fits 8 x 80 GiB with 20% to spare (64.0 GiB)" in shown
    assert total(shown) == pytest.approx(gib, rel=0.01) and f"{total(shown):.1f} GiB of each device" in fix


@pytest.mark.slow
def test_four_gpus_hold_30b_with_the_optimizer_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = planned(capsys, str(SHAPES / "Qwen3-30B-A3B"), "--gpus", "4", *TOKENS)
    (fix,) = [line for line in shown.splitlines() if line.startswith("fits with")]
    assert code == 1 and "trainer.offload = optimizer" in fix and "of the host's memory" in fix
    code, shown = planned(capsys, str(SHAPES / "Qwen3-30B-A3B"), "--gpus", "1", *TOKENS)
    assert code == 1 and "no setting makes it fit: use more devices" in shown


@pytest.mark.slow
def test_a_shape_takes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(SHAPES / "Qwen3-30B-A3B"), *TOKENS, "--set", "trainer.mesh.context=4"]
    arguments += ["--set", "numerics.recompute=true", "--set", "trainer.mesh.shard=8"]
    _, plain = planned(capsys, *arguments)
    experts = ["--set", "trainer.mesh.expert=8"]
    (_, owned), (_, uneven) = (planned(capsys, *arguments, *experts, "--skew", skew) for skew in ("1", "8"))
    assert "trainer.mesh.expert = 8" in owned and total(plain) != total(owned) < total(uneven)
    _, faster = planned(capsys, *arguments, "--set", "algorithm.learning_rate=1e-3")
    assert total(faster) > total(plain) + 2, "all weights change, so undo entries hold whole parameters"
