"""Steps of the trainer on a GPU, in exact and in ordinary mode.

    python -m benchmarks.gpu_step [--shape qwen3-0.6b] [--tokens 65536] [--sequence 8192] [--steps 3] [--arms exact ...]

A policy with random weights samples sequences on the GPU. Most of their tokens are given, as with long outputs of
tools. The trainer actor, in a new process with its own broker, then takes `--steps` steps on them with
`[trainer] device = "cuda"`. All batches hold tokens of version 0, so that the later steps score an earlier version
again. Printed for each arm: trained and forwarded tokens a second, MFU and HFU, the largest difference of re-scored
log-probabilities (0.0 in exact mode), the peak of the GPU's memory beside the memory plan, the seconds by cause, and
the pause between the optimizer's end and the next forward pass. Figures of speed are those of the last step; the first
one compiles kernels.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.conditions import Figures, arguments, at_least, at_most, cannot_run, finish
from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config
from headrace.messages.base import Array
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.subjects import STEP
from headrace.messages.tasks import TaskRef
from headrace.messages.training import StepDone, StepFailed
from headrace.parent_death import ending_with_parent
from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training import memory_plan
from headrace.training.figures.layout import layout_of
from tests.support import world
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.recorded_run import RunFeeder, config, new_run

_QWEN3: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
_MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3, **_MIXTURE, "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "vocab_size": 640,
    },
    "qwen3-0.6b": {**_QWEN3, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-4b": {
        **_QWEN3, "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-4-layers": {
        **_QWEN3, **_MIXTURE, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""config.json of each shape."""
ARMS = (
    "exact", "ordinary", "exact-recompute", "ordinary-recompute", "exact-mxfp8", "ordinary-mxfp8", "exact-offload",
)  # fmt: skip
UNCOUNTED = 0.85
"""Share of the free memory that a plan may take: it does not count temporary tensors and fragments."""
WAIT_S = 900.0
DRAWN, TURNS = 8, 4
"""Sampled tokens of a turn, and turns of a sequence."""


@torch.no_grad()
def sampled(model: Model, slot: int, tokens: int) -> Trajectory:
    """A trajectory of TURNS turns in which `tokens` positions were forwarded, on the model's device."""
    draw, there = torch.Generator().manual_seed(slot), model.embedding.device
    cache, table = KVCache(model.config, -(-tokens // 64), there), [[*range(-(-tokens // 64))]]
    covered, pending, turns = 0, torch.empty(0, dtype=torch.int64), []
    for index in range(TURNS):
        end = tokens * (index + 1) // TURNS - DRAWN + 1  # the last drawn token of a turn is forwarded in the next
        prompt = torch.randint(0, 256, (end - covered - len(pending),), generator=draw)
        new, ids, logprobs, routes, first = torch.cat((pending, prompt)), [], [], [], covered
        for _ in range(DRAWN):
            recorder: list[torch.Tensor] = []
            hidden = model.forward_cached(new.to(there), [len(new)], [covered], table, cache, recorder=recorder)[-1:]
            covered += len(new)
            if recorder:
                routes.append(torch.stack(recorder, 1).to(torch.uint8).cpu())
            new = torch.multinomial(torch.softmax(model.logits(hidden).float().cpu(), -1)[0], 1, generator=draw)
            ids.append(int(new))
            logprobs.append(float(model.selected_logprobs(hidden, new.to(there))[0]))
        pending, routed = new, torch.cat(routes) if routes else None
        turns.append(
            Turn(
                index=index,
                segment=0,
                prompt_ids=Array.of(prompt.tolist(), "<i4"),
                ids=Array.of(ids, "<i4"),
                logprobs=Array.of(logprobs, "<f4"),
                routed=None if routed is None else Array("|u1", tuple(routed.shape), routed.numpy().tobytes()),
                spans=(Span(first, covered, 0),),
            )
        )
    return Trajectory(
        run="r",
        lane="train",
        group="g000000",
        slot=slot,
        attempt=0,
        id=f"g000000-{slot}-0",
        task=TaskRef("even", "0"),
        family="even",
        seed=slot,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(turns),
        diff={},
        fingerprint=model.numerics.fingerprint,
    )


class Arm(msgspec.Struct, frozen=True):
    """One way to take the steps, read from its name."""

    exact: bool
    recompute: bool
    mxfp8: bool
    offload: bool

    @classmethod
    def of(cls, name: str) -> "Arm":
        """`exact` or `ordinary`, and what follows."""
        return cls(name.startswith("exact"), "recompute" in name, "mxfp8" in name, "offload" in name)


def policy_of(shape: str, arm: Arm) -> PolicyConfig:
    """The policy of an arm."""
    read = hugging_face.parse(SHAPES[shape])
    return msgspec.structs.replace(read, expert_format="mxfp8") if arm.mxfp8 else read


def start(folder: Path, shape: str) -> None:
    """A checkpoint with random weights and a tokenizer in the terse format: version 0 of all arms."""
    policy = hugging_face.parse(SHAPES[shape])
    numerics = probe(hugging_face.from_section(world.SECTION), exact=False)  # the weights alone are used
    checkpoint.save(folder, Model(policy, numerics, seed=1), policy)
    (folder / "tokenizer.json").write_text(world.TOKENIZER)


def draw(folder: Path, shape: str, arm: Arm, sequences: int, tokens: int) -> list[Trajectory]:
    """Trajectories of version 0, sampled on the GPU in the arm's arithmetic."""
    policy = policy_of(shape, arm)
    model = Model(policy, probe(policy, exact=arm.exact, device="cuda"), seed=None)
    model.load_state(checkpoint.load(folder)[1])
    model.cuda()
    return [sampled(model, slot, tokens) for slot in range(sequences)]


def setting(folder: Path, args: argparse.Namespace, arm: Arm, free: int) -> Config:
    """The run's configuration; micro-batches are as large as the memory plan allows."""
    sequences = args.tokens // args.sequence
    policy = {"checkpoint": str(folder / "start"), "renderer": "terse", "expert_format": "mxfp8" if arm.mxfp8 else ""}
    micro = args.tokens
    while True:
        made = config(
            folder / "run",
            policy=policy,
            engine={"exact": arm.exact},
            numerics={"recompute": arm.recompute},
            algorithm={"learning_rate": 1e-6, "moments": "bfloat16"},
            curriculum={
                "group_size": sequences, "groups_per_step": 1, "steps": args.steps + 1, "staleness": args.steps
            },
            trainer={"device": "cuda", "micro_tokens": micro, "rescore": sequences, "checkpoint_every": 1000,
                     "offload": "optimizer" if arm.offload else "none"},
        )  # fmt: skip
        plan = memory_plan.plan(policy_of(args.shape, arm), layout_of(made))
        if plan.total <= UNCOUNTED * free or micro <= args.sequence:
            return made
        micro //= 2


async def steps(folder: Path, args: argparse.Namespace, name: str) -> Figures:
    """The steps of one arm."""
    arm = Arm.of(name)
    made = await asyncio.to_thread(draw, folder / "start", args.shape, arm, args.tokens // args.sequence, args.sequence)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    setup = setting(folder, args, arm, torch.cuda.mem_get_info()[0])
    done: list[StepDone] = []
    async with Server(folder / f"broker-{name}") as server:
        async with (
            await as_writers(server.url, server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
        ):
            await declare(admin)
            feeder = RunFeeder(admin, new_run(), folder / "run")
            async with living(Trainer, setup, bus, feeder.run):
                for step in range(args.steps):
                    group = f"g{step:06d}"
                    records = [msgspec.structs.replace(one, group=group, id=f"{group}-{one.slot}-0") for one in made]
                    await feeder.close(group, records, 0)
                async with asyncio.timeout(WAIT_S):
                    async for received in admin.follow("HR_STEP", STEP.at(run=feeder.run)):
                        record = received.message
                        if isinstance(record, StepFailed):
                            raise SystemExit(f"{name}: {record}")
                        if isinstance(record, StepDone):
                            done.append(record)
                            print(f"{name} step {len(done)}: {told(record)}", file=sys.stderr, flush=True)
                        if len(done) == args.steps:
                            break
    last = told(done[-1])
    layout = layout_of(setup)
    gib = 1 << 30
    return {
        **last,
        "max_abs_dlp": max(record.max_abs_dlp for record in done),
        "rescored_tokens": sum(record.rescored_tokens for record in done),
        "first_step_s": done[0].efficiency.wall_s if done[0].efficiency else 0.0,
        "micro_tokens": setup.trainer.micro_tokens,
        "peak_gib": round((max(each.efficiency.peak_bytes for each in done if each.efficiency) - before) / gib, 2),
        "plan_gib": round(memory_plan.plan(policy_of(args.shape, arm), layout).total / gib, 2),
    }


def told(record: StepDone) -> Figures:
    """The figures of a step."""
    used = record.efficiency
    assert used is not None
    return {
        "trained_tokens_s": round(used.trained_tokens / used.wall_s, 1),
        "forwarded_tokens_s": round(used.forwarded_tokens / used.wall_s, 1),
        "mfu": round(used.mfu or 0.0, 4),
        "hfu": round(used.hfu or 0.0, 4),
        "busy_mfu": round(used.model_flops / (used.seconds["busy"] * used.peak_flops), 4) if used.peak_flops else 0.0,
        "seconds": {cause: round(seconds, 3) for cause, seconds in used.seconds.items()},
        "wall_s": round(used.wall_s, 3),
        "between_ms": round(used.between_s * 1e3, 1),
        "k1": record.k1,
        "max_abs_dlp": record.max_abs_dlp,
    }


def run(folder: Path, args: argparse.Namespace, name: str) -> Figures:
    """One arm in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--arm", name, "--folder", str(folder)]
    command += ["--shape", args.shape, "--tokens", str(args.tokens), "--sequence", str(args.sequence)]
    started = time.perf_counter()
    done = subprocess.run(
        ending_with_parent([*command, "--steps", str(args.steps)]),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    if done.returncode:
        return {"failed": done.returncode}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    figures["arm_s"] = round(time.perf_counter() - started, 1)
    print(name, json.dumps(figures), flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Run the arms and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS)
    parser.add_argument("--arm", choices=ARMS, help="one arm alone, for the benchmark itself")
    parser.add_argument("--folder", type=Path)
    args = arguments(parser, argv)
    if not torch.cuda.is_available():
        cannot_run("this machine has no CUDA device")
    torch.set_num_threads(1)
    if args.arm:
        print(json.dumps(asyncio.run(steps(args.folder, args, args.arm))))
        return
    dense = not hugging_face.parse(SHAPES[args.shape]).experts
    arms = args.arms or [name for name in ARMS if not (dense and Arm.of(name).mxfp8)]
    figures: Figures = {"shape": args.shape, "tokens": args.tokens, "sequence": args.sequence, "steps": args.steps}
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as name:
        start(Path(name) / "start", args.shape)
        for arm in arms:
            figures |= {f"{arm}.{key}": value for key, value in run(Path(name), args, arm).items()}
    exact = [figures.get(f"{arm}.max_abs_dlp", 1.0) for arm in arms if Arm.of(arm).exact]
    targets = {
        "max_abs_dlp": at_most(max(exact, default=0.0), 0.0),
        "arms": at_least(sum(f"{arm}.wall_s" in figures for arm in arms), len(arms)),
    }
    finish(figures, targets, "torch", "triton")


if __name__ == "__main__":
    main()
