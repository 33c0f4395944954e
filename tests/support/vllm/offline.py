"""Run by the interpreter of vLLM's environment: serves folders, one after the other, each in a process of its own.

A line in is JSON: a folder, prompts, the number of tokens and settings of the engine. The folder gets a file with turns
of ids and their log-probabilities, or the reason for which vLLM refuses; then the line out is `done`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.model_executor.models import registry  # type: ignore[import-not-found]

registry._run_in_subprocess = lambda inspect: inspect()  # this process is one of its own already


def turns(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all prompts, at temperature 1."""
    model = LLM(
        model=asked["folder"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=256,
        generation_config="vllm",
        seed=1,
        # This build's operator rotates queries wrongly whose heads are apart: latent attention's and lfm2's.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        **asked["settings"],
    )
    tokens = asked["tokens"]
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = asked["prompts"]
    given = [{"prompt_token_ids": ids} for ids in prompts]
    out = []
    for prompt, done in zip(prompts, model.generate(given, sampling, use_tqdm=False), strict=True):
        ids = list(done.outputs[0].token_ids)
        scored = [each[token].logprob for each, token in zip(done.outputs[0].logprobs, ids, strict=True)]
        out.append({"prompt": prompt, "ids": ids, "logprobs": scored})
    return out


def serve(asked: dict[str, Any]) -> None:
    try:
        said: dict[str, Any] = {"turns": turns(asked)}
    except BaseException as error:
        traceback.print_exc()
        line = traceback.extract_tb(error.__traceback__)[-1].line  # some of its assertions say nothing
        said = {"refused": f"{type(error).__name__}: {str(error) or line}"}
    Path(asked["folder"], "served.json").write_text(json.dumps(said))


for line in sys.stdin:
    if not (child := os.fork()):
        serve(json.loads(line))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("done", flush=True)
