"""Every type served by vLLM on this CPU: the log-probabilities of what it samples from an export are the provider's."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policy.hugging.test_types import opened, written
from tests.support import model_types
from tests.support.model_types import TYPES
from tests.support.vllm import server_fixture

pytestmark = pytest.mark.vllm
REFUSED = frozenset(
    {"gpt_oss", "llama4_text", "minimax_m2", "phimoe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
)
"""The types that this build of vLLM refuses."""
DIFFERENT = {
    "apertus": 5e-3,
    "cohere2": 0.1,
    "ernie4_5_moe": 0.2,
}
"""Bounds of the types that this build computes otherwise than transformers: apertus's activation in bfloat16, cohere2's
window one position longer, other experts in ernie4_5_moe."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process of vLLM: a folder as a line in, served.json in it and a line out."""
    command = [server_fixture.python(), str(Path(__file__).parents[2] / "support" / "vllm" / "offline.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as process:
        yield process


def served(
    server: subprocess.Popen[str], folder: Path, prompts: list[list[int]], tokens: int, **settings: Any
) -> dict[str, Any]:
    """Turns, or the reason for which vLLM refuses."""
    assert server.stdin is not None and server.stdout is not None
    settings = {"dtype": "float32", "logprobs_mode": "processed_logprobs"} | settings
    asked = {"folder": str(folder), "prompts": prompts, "tokens": tokens, "settings": settings}
    print(json.dumps(asked), file=server.stdin, flush=True)
    while server.stdout.readline().strip() != "done":
        assert server.poll() is None
    said: dict[str, Any] = json.loads((folder / "served.json").read_text())
    return said


@pytest.mark.parametrize("kind", TYPES)
def test_a_server_samples_as_the_provider_scores(
    kind: str, tmp_path: Path, server: subprocess.Popen[str], record_property: Callable[[str, object], None]
) -> None:
    folder, target = model_types.folder(tmp_path / kind, kind, wide=True), tmp_path / "out"
    model = opened(folder)
    written(model, folder, target, model.state())
    said = served(server, target, [list(range(first, first + 20)) for first in (3, 11, 42)], 12)
    if kind in REFUSED:
        pytest.skip(said["refused"])
    assert "refused" not in said, said["refused"]
    largest = 0.0
    for turn in said["turns"]:
        ids = torch.tensor(turn["prompt"] + turn["ids"])
        with torch.no_grad():
            hidden = model(ids, [len(ids)])[len(turn["prompt"]) - 1 : -1]
            scored = model.selected_logprobs(hidden, torch.tensor(turn["ids"]))[0]
        largest = max(largest, float((torch.tensor(turn["logprobs"]) - scored).abs().max()))
    record_property("largest", f"{largest:.1e}")
    assert largest < DIFFERENT.get(kind, 1e-4)


def test_drafts_of_n_grams_change_what_this_build_samples(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """Therefore the engine refuses speculation; a build for which this fails is the reason to allow it. Behind a prompt
    of all ids whatever is drawn first has a draft, the id behind it. The log-probabilities are the model's own."""
    folder, draws, vocab = model_types.folder(tmp_path / "llama", "llama", wide=True), 2_000, 96
    model, prompt = opened(folder), list(range(3, vocab))
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    said = served(server, folder, [prompt] * draws, 2, logprobs_mode="raw_logprobs", speculative_config=speculation)
    with torch.no_grad():
        first = torch.log_softmax(model.logits(model(torch.tensor(prompt), [len(prompt)])[-1:])[0], -1)
        behind = torch.stack([torch.tensor([*prompt, token]) for token in range(vocab)])
        hidden = model(behind.flatten(), [len(prompt) + 1] * vocab).view(vocab, len(prompt) + 1, -1)[:, -1]
        second = torch.log_softmax(model.logits(hidden), -1)
    ids = torch.tensor([turn["ids"] for turn in said["turns"]])
    scored = torch.tensor([turn["logprobs"] for turn in said["turns"]])
    assert torch.allclose(scored, torch.stack((first[ids[:, 0]], second[ids[:, 0], ids[:, 1]]), 1), atol=1e-4)
    wanted = float((first[:, None] + second).exp().diagonal(1).sum()) * draws
    assert float((ids[:, 1] == ids[:, 0] + 1).sum()) > 10 * wanted, "drafts are drawn as often as the model draws them"
