"""Compares the embedded engine and the trainer, on a pretrained Llama, with plain PyTorch code for the same work.

    python -m benchmarks.pretrained_engine .cache/smollm2 [--repeats 5] [--tokens 16] [--batches 1,8,32]

The checkpoint comes from `headrace policy from-gguf` (docs/models.md). `Plain` below is the comparison: the least torch
code that samples from this architecture and trains it, with one contiguous cache of a slot per sequence and no
requests, sessions, versions, prefix reuse or promise about bits. It measures one thread by the processor time of the
whole process, which other load distorts least. The sides take turns within a repeat. Figures are medians; a ratio is
the median of the repeats' ratios.

 - prefill: contexts of 256 tokens, 8 at once, and the first token drawn at temperature 1;
 - decode: `tokens` further tokens of each of these contexts in every repeat, drawn at temperature 1, through
   `EmbeddedEngine.sample`;
 - training: forward and backward of 8 sequences of 256 tokens with every fourth token in the loss, by
   `training.gradient.accumulate`, gradients added in float32.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from benchmarks.conditions import Figures, at_least, cannot_run, finish
from headrace.config import Algorithm
from headrace.engines.base import SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Recipe, accumulate
from headrace.training.state import TrainerState
from headrace.weights import tensor_state

CONTEXT = 256
SEQUENCES = 8
CHUNK = 512
"""Rows whose logits `Plain` holds at once in training."""


class _Attention(torch.autograd.Function):
    """softmax(q k + mask) v with the query heads of a group as rows: q [G, r T, D] scaled, k [G, D, S], v [G, S, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, group: int) -> Tensor:
        batch, rows, _ = q.shape
        shares = torch.bmm(q, k).view(batch, group, rows // group, -1).add_(mask).softmax(-1).view(batch, rows, -1)
        ctx.save_for_backward(q, k, v, shares)
        return torch.bmm(shares, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, shares = ctx.saved_tensors
        grad = grad.contiguous()
        g_shares = torch.bmm(grad, v.transpose(1, 2))
        g_scores = torch._softmax_backward_data(g_shares, shares, -1, shares.dtype)
        g_v = torch.bmm(shares.transpose(1, 2), grad)
        return torch.bmm(g_scores, k.transpose(1, 2)), torch.bmm(q.transpose(1, 2), g_scores), g_v, None, None


class Plain:
    """A dense Llama in plain torch. Dimensions: B sequences, T new tokens of each, S keys, D width of a head."""

    def __init__(self, config: PolicyConfig, tensors: dict[str, Tensor]) -> None:
        c, dtype = config, config.torch_dtype
        self.c = config

        def layer(index: int) -> list[Tensor]:
            def named(*names: str) -> Tensor:
                return torch.cat([tensors[f"model.layers.{index}.{name}.weight"] for name in names]).to(dtype)

            return [
                named("input_layernorm"),
                named("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                named("self_attn.o_proj"),
                named("post_attention_layernorm"),
                named("mlp.gate_proj", "mlp.up_proj"),
                named("mlp.down_proj"),
            ]

        self.layers = [layer(index) for index in range(c.layers)]
        self.embedding = tensors["model.embed_tokens.weight"].to(dtype)
        self.norm = tensors["model.norm.weight"].to(dtype)
        frequencies = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim))
        angles = torch.arange(2048).float()[:, None] * frequencies
        self.cos = torch.cat((angles, angles), -1).cos().to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        """With the sign of the first half: a rotation is x cos + swapped(x) sin."""

    @property
    def weights(self) -> list[Tensor]:
        """All parameters."""
        return [self.embedding, self.norm, *(weight for layer in self.layers for weight in layer)]

    def new_cache(self, batch: int, length: int) -> list[Tensor]:
        """Keys and values [layers, B, kv_heads, length, D]."""
        c = self.c
        return [torch.zeros(c.layers, batch, c.kv_heads, length, c.head_dim, dtype=c.torch_dtype) for _ in "kv"]

    def forward(self, ids: Tensor, starts: Tensor | None = None, cache: list[Tensor] | None = None) -> Tensor:
        """ids [B, T] at positions from starts [B] on -> hidden states [B * T, width]. Without a cache, which has a slot
        per sequence, all start at 0, and the result is differentiable."""
        c, (batch, steps) = self.c, ids.shape
        heads, dim, group = c.kv_heads, c.head_dim, c.heads // c.kv_heads
        starts = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
        positions = starts[:, None] + torch.arange(steps)
        keys, rows = int(positions.max()) + 1, torch.arange(batch)[:, None]
        cos, sin = (x[positions.view(-1)][:, None] for x in (self.cos, self.sin))
        mask = torch.zeros(batch, 1, steps, keys, dtype=c.torch_dtype)
        mask = mask.masked_fill_(torch.arange(keys) > positions[:, None, :, None], -math.inf)
        mask = mask.repeat_interleave(heads, 0)
        x = F.embedding(ids.view(-1), self.embedding)
        for index, (norm, qkv, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            h = F.linear(F.rms_norm(x, (c.dim,), norm, c.eps), qkv).view(-1, c.heads + 2 * heads, dim)
            qk, v = h[:, : c.heads + heads], h[:, c.heads + heads :]
            qk = qk * cos + torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), -1) * sin
            q = (qk[:, : c.heads] * dim**-0.5).view(batch, steps, heads, group, dim).permute(0, 2, 3, 1, 4)
            k, v = (t.reshape(batch, steps, heads, dim) for t in (qk[:, c.heads :], v))
            if cache is None:
                k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
            else:
                for cached, new in zip(cache, (k, v), strict=True):
                    cached[index][rows, :, positions] = new
                k, v = (cached[index, :, :, :keys].contiguous() for cached in cache)
            k, v = k.view(batch * heads, keys, dim).transpose(1, 2), v.view(batch * heads, keys, dim)
            arguments = (q.reshape(batch * heads, group * steps, dim), k, v, mask, group)
            mixed: Tensor = _Attention.apply(*arguments)  # type: ignore[no-untyped-call]
            mixed = mixed.view(batch, heads, group, steps, dim).permute(0, 3, 1, 2, 4).reshape(batch * steps, -1)
            x = x + F.linear(mixed, out)
            gate, up = F.linear(F.rms_norm(x, (c.dim,), mlp_norm, c.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.rms_norm(x, (c.dim,), self.norm, c.eps)

    def sample(self, hidden: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw at temperature 1 -> (ids, their log-probabilities)."""
        logits = F.linear(hidden, self.embedding).float()
        total = logits.logsumexp(-1)
        sums = torch.cumsum((logits - total[:, None]).exp_(), -1)
        wanted = torch.rand(len(logits), 1, generator=generator) * sums[:, -1:]
        ids = torch.searchsorted(sums, wanted).clamp_(max=logits.shape[1] - 1)[:, 0]
        return ids, logits.gather(1, ids[:, None])[:, 0] - total

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of targets; backward computes the logits again."""

        def part(h: Tensor, chosen: Tensor) -> Tensor:
            logits = F.linear(h, self.embedding).float()
            return logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)

        chunks = zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True)
        return torch.cat([recomputed(part, h, chosen, use_reentrant=False) for h, chosen in chunks])


class Work(NamedTuple):
    """Tokens that a side computed, and the processor seconds that it took, by kind of work."""

    tokens: int
    seconds: float


def timed(tokens: int, function: Callable[[], object]) -> Work:
    """Run once."""
    began = time.process_time()
    function()
    return Work(tokens, time.process_time() - began)


class PlainSide:
    """Draws with `Plain`; the context grows from call to call."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.generator = plain, torch.Generator().manual_seed(0)

    async def start(self, contexts: list[tuple[int, ...]], most: int) -> Work:
        """Forget the former contexts, forward new ones and draw the first token of each; `most` tokens follow."""
        self.length, batch = CONTEXT, len(contexts)
        self.starts = torch.zeros(batch, dtype=torch.int64)
        self.cache = self.plain.new_cache(batch, CONTEXT + most)
        began = time.process_time()
        with torch.inference_mode():
            hidden = self.plain.forward(torch.tensor(contexts), self.starts, self.cache)
            self.ids = self.plain.sample(hidden.view(batch, CONTEXT, -1)[:, -1], self.generator)[0]
        return Work(batch * CONTEXT, time.process_time() - began)

    async def go_on(self, tokens: int) -> Work:
        """Draw further tokens of each context."""
        began = time.process_time()
        with torch.inference_mode():
            for _ in range(tokens):
                hidden = self.plain.forward(self.ids[:, None], self.starts + self.length, self.cache)
                self.ids, logprobs = self.plain.sample(hidden, self.generator)
                logprobs.tolist()
                self.length += 1
        return Work(len(self.ids) * tokens, time.process_time() - began)


class EngineSide:
    """Draws through an engine: each call is a turn of the same sessions, whose contexts are cached."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine, self.contexts = engine, list[tuple[int, ...]]()

    async def start(self, contexts: list[tuple[int, ...]], most: int) -> Work:
        """As `PlainSide.start`."""
        for index in range(len(self.contexts)):
            await self.engine.close(f"s{index}")
        self.contexts = contexts
        seconds = await self._turn(1)
        return Work(len(contexts) * CONTEXT, seconds)

    async def go_on(self, tokens: int) -> Work:
        """As `PlainSide.go_on`."""
        return Work(len(self.contexts) * tokens, await self._turn(tokens))

    async def _turn(self, tokens: int) -> float:
        sampling = Sampling(max_turn_tokens=tokens)
        requests = [
            SampleRequest(session=f"s{index}", ids=ids, policy=PolicyRef(), sampling=sampling, stop_ids=(), seed=index)
            for index, ids in enumerate(self.contexts)
        ]
        began = time.process_time()
        samples = await asyncio.gather(*(self.engine.sample(request) for request in requests))
        seconds = time.process_time() - began
        self.contexts = [(*ids, *sample.ids) for ids, sample in zip(self.contexts, samples, strict=True)]
        return seconds


def segments(vocab: int) -> tuple[Segment, ...]:
    """Random sequences with every fourth token sampled, half of them with each sign of the advantage."""
    generator, positions = torch.Generator().manual_seed(0), torch.arange(3, CONTEXT, 4)
    sequences = []
    for index in range(SEQUENCES):
        ids = torch.randint(0, vocab, (CONTEXT + 1,), generator=generator)
        sequences.append(
            Segment(
                trajectory=str(index),
                ids=ids[:-1],
                positions=positions,
                targets=ids[1:][positions],
                behaviour=torch.full((len(positions),), -12.0),
                versions=torch.zeros(len(positions), dtype=torch.int64),
                routed=None,
                spans=(),
                advantage=1.0 if index % 2 else -1.0,
                temperature=1.0,
                index=index,
            )
        )
    return tuple(sequences)


def plain_training(plain: Plain, sums: list[Tensor], parts: tuple[Segment, ...]) -> None:
    """Forward, backward, and gradients in float32."""
    for weight in plain.weights:
        weight.requires_grad_(True)
    hidden = plain.forward(torch.stack([part.ids for part in parts])).view(SEQUENCES, CONTEXT, -1)
    targets = torch.cat([part.targets for part in parts])
    advantage = torch.cat([part.advantages for part in parts])
    logp = plain.logprobs(hidden[:, parts[0].positions].flatten(0, 1), targets)
    (-(logp * advantage).sum() / len(targets)).backward()  # type: ignore[no-untyped-call]
    sums[:] = [weight.grad.float() for weight in plain.weights if weight.grad is not None]
    for weight in plain.weights:
        weight.grad = None
        weight.requires_grad_(False)


async def measure(folder: Path, batches: list[int], tokens: int, repeats: int) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    try:
        config, tensors = checkpoint.load(folder)
    except CheckpointError as error:
        cannot_run(f"{error}: make the folder with `headrace policy from-gguf` (docs/models.md)")
    if config.model_type != "llama" or config.rope is not None or not config.tied:
        cannot_run(f"{folder} is no dense Llama with tied embeddings and plain rotary positions")
    sides = {"exact": probe(config), "ordinary": probe(config, exact=False)}
    if not sides["exact"].exact:
        cannot_run(f"this machine has no exact mode: {sides['exact'].reason}")
    speeds: dict[str, dict[str, list[float]]] = {}

    def note(side: str, kind: str, work: Work) -> None:
        speeds.setdefault(kind, {}).setdefault(side, []).append(work.tokens / work.seconds)

    plain, vocab = Plain(config, tensors), config.vocab
    engines, states = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for side, numerics in sides.items():
            model = Model(config, numerics, seed=None)
            model.load_state(tensors)
            digest = tensor_state.write(Path(place) / side, model.state())
            engines[side] = EmbeddedEngine(config, numerics, prefill_tokens=SEQUENCES * CONTEXT)
            await engines[side].load(0, str(Path(place) / side), digest)
            states[side] = TrainerState(model)
    drawing: dict[str, PlainSide | EngineSide] = {
        "plain": PlainSide(plain),
        **{side: EngineSide(engine) for side, engine in engines.items()},
    }
    rng = random.Random(0)
    for batch in batches:
        for repeat in range(-1, repeats if batch == SEQUENCES else 0):  # the first is not counted, here and below
            contexts = [tuple(rng.randrange(vocab) for _ in range(CONTEXT)) for _ in range(batch)]
            for side, draws in drawing.items():
                work = await draws.start(contexts, tokens * (repeats + 1))
                if repeat >= 0:
                    note(side, f"prefill_{SEQUENCES}x{CONTEXT}", work)
        for repeat in range(-1, repeats):
            for side, draws in drawing.items():
                work = await draws.go_on(tokens)
                if repeat >= 0:
                    note(side, f"decode_b{batch}", work)
    for engine in engines.values():
        await engine.stop()
    parts, sums = segments(vocab), list[Tensor]()
    batch_of = Batch(parts, SEQUENCES, (0.0,) * SEQUENCES, 0, (), frozenset())
    recipe = Recipe(Algorithm(), SEQUENCES * CONTEXT)
    for repeat in range(-1, repeats):
        found_work = {"plain": timed(SEQUENCES * CONTEXT, lambda: plain_training(plain, sums, parts))}
        for side, state in states.items():
            found_work[side] = timed(SEQUENCES * CONTEXT, partial(accumulate, state, batch_of, recipe))
            state.zero_grad()
        for side, work in found_work.items() if repeat >= 0 else ():
            note(side, f"train_{SEQUENCES}x{CONTEXT}", work)
    figures: Figures = {
        "model": config.described,
        "fingerprint": sides["exact"].fingerprint,
        "tokens": tokens,
        "context": CONTEXT,
        "repeats": repeats,
    }
    targets = {}
    for kind, by_side in speeds.items():
        for side, values in by_side.items():
            figures[f"{side}_{kind}_tok_per_cpu_s"] = round(statistics.median(values), 1)
            if side != "plain":
                ratios = [rate / other for rate, other in zip(values, by_side["plain"], strict=True)]
                figures[f"{side}_{kind}_over_plain"] = round(statistics.median(ratios), 3)
                figures[f"{side}_{kind}_over_plain_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
                if side == "ordinary" or not kind.startswith("decode_b1"):
                    targets[f"{side}_{kind}_over_plain"] = at_least(figures[f"{side}_{kind}_over_plain"], 1.0)
    finish(msgspec.to_builtins(figures), targets, "torch", "numpy")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained_engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    batches = [int(word) for word in args.batches.split(",")]
    asyncio.run(measure(args.folder, batches, args.tokens, args.repeats))


if __name__ == "__main__":
    main()
