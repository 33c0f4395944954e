"""A checkpoint in its own chat format through the rollout actor: scripted and sampled turns, bundle from the bus."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.actors.trainer import initial_policy
from headrace.bus.connection import Bus
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config, Policy, Production, Run
from headrace.config import Environment as Section
from headrace.harness.prompt import whole_prompt
from headrace.harness.rendered import differing
from headrace.harness.tools.registry import schemas_of
from headrace.harness.tools.toolbox import tools_of
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.policy.layout import checkpoint as layout
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.rendering.registry import Renderers
from headrace.tasks import open_suite
from headrace.weights import tensor_state
from tests.actors.rollout.test_policies import end_of, issue
from tests.conftest import Connect
from tests.support import chat_formats
from tests.support.actors import living
from tests.support.staged import stage

pytestmark = pytest.mark.anyio
SIZES: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.fixture(params=["qwen3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny untrained model as transformers writes it, with a ChatML template."""
    torch.manual_seed(1)
    qwen3 = request.param == "qwen3"
    made: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)) if qwen3 else _llama()
    folder = tmp_path / "checkpoint"
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(chat_formats.tokenizer_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_formats.CHATML, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    return folder


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    config = Config(run=Run(dir=str(tmp_path)), environment=Section(backend="process", lease_s=20.0))
    async with living(Environment, config, await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


async def test_an_episode_in_a_checkpoints_own_format(
    connect: Connect, environment: Environment, checkpoint: Path, tmp_path: Path, observer: Bus
) -> None:
    run = f"chat{checkpoint.parent.name[-12:].replace('_', '-').lower().strip('-')}"
    config = Config(
        run=Run(dir=str(tmp_path / "rollout")),
        policy=Policy(checkpoint=str(checkpoint)),
        environment=Section(backend="process", lease_s=20.0),
        production=Production(enabled=False),
    )
    bundle = initial_policy.bundle(config, tmp_path / "trainer" / run)
    assert bundle.renderer == "hermes"
    assert initial_policy.bundle(config, tmp_path / "trainer" / run) == bundle, "made once"
    await renderer_bundles.publish(await connect("trainer"), run, bundle)

    torch.set_num_threads(1)
    shape, state = layout.load(checkpoint)
    model = Model(shape, probe(shape), seed=None)
    model.load_state(state)
    file = Path(config.run.dir) / run / "0.safetensors"
    await stage(observer, run, "here", 0, str(file), tensor_state.write(file, model.state()))

    async with living(Rollout, config, await connect("rollout", node="here"), run, "roll"):
        await issue(observer, run, "sampled")
        await issue(observer, run, "scripted", policy=PolicyRef(kind="scripted", name="oracle"))
        ends = {group: await end_of(observer, run, group) for group in ("sampled", "scripted")}
    task = open_suite("generated/train").task(ends["sampled"].task.task)
    renderer = Renderers(bundle).open(schemas_of(tools_of(task)))
    for group, end in ends.items():
        assert end.renderer == bundle.sha256
        again = Renderers(bundle).open(schemas_of(tools_of(task)))
        assert differing(end.turns, whole_prompt(task.system, task.prompt), again, 6) == (), "the replay is bit-equal"
        check_ids(end, renderer.tokenizer.decode([int(id) for id in end.turns[0].prompt_ids.tolist()]))
        assert (end.oldest_version == 0) is (group == "sampled")
    scripted = ends["scripted"]
    assert scripted.malformed_calls == 0 and scripted.turns[0].calls[0].name == "edit_file"
    assert scripted.turns[0].results[0].ok and scripted.diff
    second = renderer.tokenizer.decode([int(id) for id in scripted.turns[1].prompt_ids.tolist()])
    assert second.startswith("\n<|im_start|>user\n<tool_response>\nok\n</tool_response>")


def check_ids(end: Trajectory, opening: str) -> None:
    """The prompt is the template's own, with exactly the tools of the task."""
    assert opening.startswith("<|im_start|>system\n") and opening.endswith("<|im_start|>assistant\n")
    assert opening.count('"type": "function"') == 5 and '"name": "terminal"' not in opening
    assert '"name": "edit_file"' in opening
    assert end.turns and all(turn.calls for turn in end.turns)
