"""The description that a vLLM server gives of itself, and its command line."""

from pathlib import Path
from typing import Any

import pytest

from headrace.engines.server.backend import IncompatibleServer
from headrace.engines.server.http import Wire
from headrace.engines.server.options import ServerOptions
from headrace.engines.vllm.backend import Vllm
from tests.support import tiny

MIXTURE, DENSE = tiny.config(), tiny.config(experts=0, top_k=0)
SAID: dict[str, Any] = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "dtype": "torch.float32",
        "max_model_len": 512,
        "quantization": None,
    },
    "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 2},
    "scheduler_config": {"policy": "priority"},
    "device_config": {"device_type": "cuda"},
    "aux_output_config": {"enable_return_routed_experts": True},
    "speculative_config": None,
}


def backend(config: Any = MIXTURE) -> Vllm:
    return Vllm(config, ServerOptions(args=("--enforce-eager",)), Wire("http://127.0.0.1:9"), 8)


def test_terms_of_a_fit_server() -> None:
    terms = backend()._terms("0.32.0", SAID)
    assert (terms.device, terms.dtype, terms.tp_size, terms.context) == ("cuda", "float32", 2, 512)
    other = SAID | {"model_config": SAID["model_config"] | {"dtype": "torch.bfloat16"}}
    assert backend()._terms("0.32.0", other).fingerprint != terms.fingerprint


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ("model_config", {"generation_config": "auto"}, "--generation-config vllm"),
        ("parallel_config", {"data_parallel_size": 2}, "--data-parallel-size 1"),
        ("aux_output_config", {"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
    ],
)
def test_a_server_that_is_unfit_is_told_what_to_change(section: str, changes: dict[str, Any], words: str) -> None:
    said = SAID | {section: SAID[section] | changes}
    with pytest.raises(IncompatibleServer, match=words):
        backend()._terms("0.32.0", said)
    if section == "aux_output_config":
        assert backend(DENSE)._terms("0.32.0", said).dtype == "float32", "a dense policy has no routes"


def test_speculative_decoding_is_refused() -> None:
    with pytest.raises(IncompatibleServer, match="no speculative decoding, which changed what is sampled"):
        backend(DENSE)._terms("0.32.0", SAID | {"speculative_config": {"method": "ngram"}})


def test_the_command_switches_on_what_the_client_needs(tmp_path: Path) -> None:
    command = backend().command(tmp_path, "0-a", 7)
    words = list(command.arguments)
    for pair in (("--dtype", "float32"), ("--max-num-seqs", "8"), ("--port", "7"), ("--model", str(tmp_path))):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert {"--enable-scale-out", "--enable-return-routed-experts"} < set(words) and words[-1] == "--enforce-eager"
    assert command.forced == {"VLLM_SERVER_DEV_MODE": "1"}
    assert "--enable-return-routed-experts" not in backend(DENSE).command(tmp_path, "0-a", 7).arguments
