"""Measures the delta of a step that trains adapters against that of a step that trains all weights.

    python -m benchmarks.adapter_delta [--layers 30] [--rank 16] [--steps 3] [--rates 5e-6,5e-5]

One shape (that of SmolLM2-135M in bfloat16, random weights), the same sequences and advantages, one process: each arm
takes real steps with the trainer's state and optimizer, publishes every version into a snapshot file, and encodes it as
the sender does. An adapter is usually trained at ten times the learning rate, so its arm takes ten times each rate.
`decode_cpu_ms` is the processor time of one decode step of 8 sequences, best of five.
"""

import argparse
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.conditions import Figures, finish
from headrace.policy.adapters import low_rank, shape
from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training.state import TrainerState
from headrace.weights import tensor_state
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.snapshot import Snapshot

SEQUENCES, LENGTH = 4, 64


def policy(layers: int, rank: int) -> PolicyConfig:
    """SmolLM2-135M's shape; rank 0 has no adapters."""
    plain = PolicyConfig(
        dim=576, layers=layers, heads=9, kv_heads=3, head_dim=64, experts=0, top_k=0, expert_dim=1536, vocab=49152,
        dtype="bfloat16", tied=True, model_type="llama", qk_norm=False,
    )  # fmt: skip
    adapter = shape.resolved(plain, rank, 32.0, ()) if rank else None
    return msgspec.structs.replace(plain, adapter=adapter)


def arm(config: PolicyConfig, rate: float, steps: int, folder: Path) -> Figures:
    """Steps at a rate: bytes of each delta, and the bytes of the whole version."""
    model = Model(config, probe(config, exact=False), seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.adapter is None or low_rank.is_adapter(name))
    state = TrainerState(model)
    generator = torch.Generator().manual_seed(7)
    base, deltas, changed = folder / "base", [], []
    tensor_state.write(base, state.published())
    for _ in range(steps):
        ids = torch.randint(0, config.vocab, (SEQUENCES, LENGTH), generator=generator)
        advantages = torch.randn(SEQUENCES, generator=generator)
        hidden = model(ids.reshape(-1), [LENGTH] * SEQUENCES).reshape(SEQUENCES, LENGTH, -1)[:, :-1]
        logp, _ = model.selected_logprobs(hidden.reshape(-1, config.dim), ids[:, 1:].reshape(-1))
        torch.autograd.backward(-(logp.reshape(SEQUENCES, -1) * advantages[:, None]).mean())
        state.collect_gradients()
        state.apply(rate, min(1.0, 1.0 / state.gradient_norm()))
        target = folder / "target"
        tensor_state.write(target, state.published())
        encoding = Encoding(Snapshot(target), Snapshot(base))
        deltas.append(sum(len(chunk) for chunk in encoding.chunks()))
        changed.append(encoding.changed)
        target.replace(base)
    whole = sum(tensor.nbytes for tensor in state.published().values())
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "rate": rate,
        "parameters": count,
        "trained": sum(master.numel() for master in state.master.values()),
        "version_bytes": whole,
        "delta_bytes": deltas,
        "changed": [round(number / count, 6) for number in changed],
        "ratio": [round(whole / size) for size in deltas],
        "decode_cpu_ms": round(decode_ms(model), 1),
    }


@torch.no_grad()
def decode_ms(model: Model) -> float:
    """Processor milliseconds of one decode step of 8 sequences, best of five."""
    cache, rows = KVCache(model.config, 8), [[number] for number in range(8)]
    best = float("inf")
    for at in range(5):
        since = time.process_time()
        hidden = model.forward_cached(torch.arange(8), [1] * 8, [at] * 8, rows, cache)
        model.logits(hidden)
        best = min(best, time.process_time() - since)
    return best * 1e3


def main() -> None:
    """Run both arms at every rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rates", default="5e-6,5e-5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    arms: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in map(float, args.rates.split(",")):
            arms[f"all weights, {rate:g}"] = arm(policy(args.layers, 0), rate, args.steps, Path(folder))
            arms[f"adapters, {10 * rate:g}"] = arm(policy(args.layers, args.rank), 10 * rate, args.steps, Path(folder))
    finish({"rank": args.rank, "arms": arms}, {}, "torch")


if __name__ == "__main__":
    main()
