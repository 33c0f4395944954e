"""A checkpoint folder behind the real SGLang server on this CPU: a tied Llama with its own tokenizer and chat format.

`make test-sglang`. The folder is made of a tiny GGUF file as the Makefile makes SmolLM2's; a second one is SmolLM2
itself where .cache/smollm2 is there (`make demo-sglang-pretrained`). The server has the arguments of the demo's
configuration and gets versions as tensors, published in bfloat16 while it computes in float32.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from headrace.cli.main import main
from headrace.config import load
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.server.engine import OneServer
from headrace.messages.rollout import Sampling, ToolResult
from headrace.policy import scoring
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.rendering.base import Answered
from headrace.rendering.bundle import checkpoint_bundle
from headrace.rendering.registry import Renderers
from headrace.rendering.schemas import TABLE
from headrace.weights import tensor_state
from tests.policy.gguf.test_convert import written
from tests.support import tiny
from tests.support.adapters import Adapters, are_served
from tests.support.engines import LATEST, Record
from tests.support.paths import ROOT
from tests.support.sglang.opening import opened
from tests.support.sglang.requests import begun
from tests.support.sglang.server_fixture import prepared, python

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

DEMO = ROOT / "deploy" / "demo-sglang-pretrained.toml"
TEMPLATE = ROOT / "deploy" / "smollm2.jinja"
SMOLLM2 = ROOT / ".cache" / "smollm2"
NATS_TOLERANCE = 1e-3


def tiny_folder(folder: Path) -> Path:
    """A folder of a tiny GGUF file, with as many positions as the demo's server has."""
    written(folder / "tiny.gguf")
    words = ["policy", "from-gguf", str(folder / "tiny.gguf"), str(folder / "hf"), "--dtype", "float32"]
    assert main([*words, "--chat-template", str(TEMPLATE)]) == 0
    file = folder / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2048}))
    return folder / "hf"


class Served:
    """A checkpoint behind a server, and the trainer's code on the versions that the server gets."""

    def __init__(self, folder: Path, work: Path) -> None:
        bundle = checkpoint_bundle(folder, system="You fix Python functions.")
        self.renderer = Renderers(bundle).open(TABLE[:3])
        (work / "tokenizer.json").write_text(bundle.tokenizer_json, encoding="utf-8")  # as the rollout actor does
        self.config, tensors = checkpoint.load(folder)
        self.models: dict[int, Model] = {}
        self.files: list[tuple[str, str]] = []
        for version in range(2):
            state = {name: (tensor * (1 + version / 64)).bfloat16() for name, tensor in tensors.items()}
            path = work / f"{version}.safetensors"
            self.files.append((str(path), tensor_state.write(path, state)))
            self.models[version] = Model(self.config, tiny.numerics(self.config, False), seed=None)
            self.models[version].load_state(state)
        options = load(DEMO).engine.options | {"python": python(), "weights": "auto"}
        made = opened(self.config, work, "llama", **options)  # type: ignore[arg-type]
        assert isinstance(made, OneServer)
        self.engine = made

    async def turn(self, name: str, ids: list[int], tokens: int, stops: tuple[int, ...]) -> Sample:
        return await self.engine.sample(
            SampleRequest(
                session=name,
                ids=tuple(ids),
                policy=LATEST,
                sampling=Sampling(max_turn_tokens=tokens),
                stop_ids=stops,
                seed=7,
            )
        )

    def worst(self, record: Record) -> float:
        """Largest |server - the trainer's code| in nats."""
        models = {span.version: self.models[span.version] for span in record.spans}
        with torch.no_grad():
            scored = scoring.score(models, record.ids, record.spans, record.targets, 1.0, None)
        return float((scored - scored.new_tensor(record.logprobs)).abs().max())


@pytest.fixture(scope="module", params=["tiny", "SmolLM2"])
async def served(
    anyio_backend: object, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    python()
    work = tmp_path_factory.mktemp("served")
    if request.param == "SmolLM2" and not (SMOLLM2 / "config.json").exists():
        pytest.skip(f"{SMOLLM2} is not there; `make demo-sglang-pretrained` makes it")
    one = Served(SMOLLM2 if request.param == "SmolLM2" else tiny_folder(work), work)
    try:
        await one.engine.load(0, *one.files[0])
        yield one
    finally:
        await one.engine.stop()


async def test_it_holds_the_bits_of_the_published_version(served: Served) -> None:
    stats = served.engine.stats()
    assert served.engine.version == 0 and stats["checked"], "its checksums are those of the file"


async def test_the_servers_tokenizer_gives_the_renderers_ids(served: Served) -> None:
    prompt = served.renderer.prompt("mean([1, 2]) should give 1.5\n    # über 42")
    text = served.renderer.tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nYou fix Python functions.\nTools: ")
    answer = await served.engine._wire.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer["tokens"] == prompt


async def test_turns_in_its_own_format_have_the_trainers_logprobs(served: Served) -> None:
    """Two turns with a result between them, as the harness plays them."""
    renderer, record = served.renderer, Record(temperature=1.0)
    history: list[Answered] = []
    more = renderer.prompt("f should give 1")
    for _ in range(2):
        sample = await served.turn("episode", [*record.ids, *more], 24, renderer.stop_ids)
        record.add(more, sample, served.config)
        stopped = sample.ids[-1] if sample.stop == "stop" else None
        assert stopped in (None, *renderer.stop_ids) and not set(sample.ids[:-1]) & set(renderer.stop_ids)
        calls = renderer.parse(sample.ids, prompt=record.ids[: -len(sample.ids)]).calls
        results = tuple(ToolResult(call_id=call.id, ok=False, output="f() gives 0") for call in calls)
        history.append(Answered(calls=calls, results=results))
        more = renderer.delta(history, stopped=stopped)
    gap = served.worst(record)
    print(f"largest difference {gap:.2e} nats over {len(record.targets)} tokens")
    assert gap < NATS_TOLERANCE


async def test_no_id_ends_a_turn_but_the_requests_own(served: Served) -> None:
    """Id 2, at which transformers ends a Llama whose config.json names no end; <|im_end|> in these folders."""
    if served.config.layers > 2:
        pytest.skip("SmolLM2 has to be asked too often")
    prompt = served.renderer.prompt("f")
    for _ in range(50):
        sample = await served.turn("endless", prompt, 256, ())
        assert len(sample.ids) == 256 and sample.stop == "length"
        if 2 in sample.ids[:-1]:
            return
    pytest.fail("id 2 was not sampled")


async def test_a_version_is_swapped_in_place_under_a_turn(served: Served) -> None:
    prompt = served.renderer.prompt("f should give 2")
    work = asyncio.create_task(served.turn("swap", prompt, 128, ()))
    await begun(served.engine)
    await served.engine.load(1, *served.files[1])
    sample, stats, record = await work, served.engine.stats(), Record(temperature=1.0)
    record.add(prompt, sample, served.config)
    assert [span.version for span in sample.spans] == [0, 1] and len(sample.ids) == 128
    assert stats["checked"] and stats["tensor_bytes"] == sum(
        tensor.nbytes for tensor in tensor_state.read(served.files[1][0]).values()
    )
    gap = served.worst(record)
    print(f"largest difference {gap:.2e} nats in two spans, pause {stats['pause_ms']:.0f} ms")
    assert gap < NATS_TOLERANCE


async def test_adapters_are_loaded_beside_the_checkpoint(tmp_path: Path) -> None:
    versions = Adapters(tiny.config(heads=4, kv_heads=2, experts=0, top_k=0), tmp_path)
    engine = prepared(versions, tmp_path, swap="abort")
    try:
        await are_served(engine, versions)
    finally:
        await engine.stop()
