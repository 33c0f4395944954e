"""Makes real weights by real optimizer steps, as input of the weight benchmarks.

A Qwen3-MoE policy of about 63 M parameters (or smaller) is first trained on synthetic text (bigrams over a Zipf
vocabulary), then by policy gradient with group advantages, Adam and float32 master weights. From one such state, one
more step is taken at any number of learning rates; what is published is the bf16 rounding of the master weights.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights.publishing import precision

Weights = dict[str, Tensor]

SIZES = {"60m": (512, 4, 8, 1024, 8192), "8m": (256, 2, 8, 512, 2048), "1m": (128, 1, 8, 192, 1024)}
"""dim, layers, experts, expert_dim, vocab."""
GROUP, LENGTH = 4, 64


class Text:
    """Sequences over a Zipf vocabulary in which half of the tokens follow from the one before."""

    def __init__(self, vocab: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.chances = 1.0 / torch.arange(1, vocab + 1)
        self.after = torch.randint(0, vocab, (vocab,), generator=self.generator)

    def draw(self, sequences: int) -> Tensor:
        """int64 [sequences, LENGTH]."""
        ids = torch.multinomial(self.chances, sequences * LENGTH, replacement=True, generator=self.generator)
        ids = ids.reshape(sequences, LENGTH)
        follows = torch.rand(ids.shape, generator=self.generator) < 0.5
        for at in range(1, LENGTH):
            ids[:, at] = torch.where(follows[:, at], self.after[ids[:, at - 1]], ids[:, at])
        return ids


class Trained:
    """A model in the middle of training: `step(lr)` gives the published weights after one more step from here."""

    def __init__(self, size: str, *, pretrain: int, steps: int, seed: int = 1):
        dim, layers, experts, expert_dim, vocab = SIZES[size]
        config = PolicyConfig(
            dim=dim,
            layers=layers,
            heads=dim // 64,
            kv_heads=dim // 64,
            head_dim=64,
            experts=experts,
            top_k=2,
            expert_dim=expert_dim,
            vocab=vocab,
        )
        self.model = Model(config, probe(config, exact=False), seed=seed)
        self.parameters = list(self.model.parameters())
        self.count = sum(parameter.numel() for parameter in self.parameters)
        text = self.text = Text(vocab, seed)
        optimizer = self._adam(1e-3)
        for _ in range(pretrain):
            self._backward(text.draw(2 * GROUP), None)
            optimizer.step()
        # Like a checkpoint that is loaded for reinforcement learning: bf16 weights, new moments.
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(parameter.bfloat16())
        self.optimizer = self._adam(1e-6)
        started = time.monotonic()
        for index in range(steps + 1):
            ids = text.draw(2 * GROUP)
            rewards = (ids < 8).float().mean(1).reshape(-1, GROUP)
            self._backward(ids, (rewards - rewards.mean(1, keepdim=True)).reshape(-1))
            if index < steps:
                self.optimizer.step()
        self.step_s = (time.monotonic() - started) / (steps + 1)
        self.before = self.published()
        self._master = [parameter.detach().clone() for parameter in self.parameters]
        state = self.optimizer.state
        self._moments = [{k: v.clone() for k, v in state[parameter].items()} for parameter in self.parameters]

    def _adam(self, rate: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def _backward(self, ids: Tensor, advantages: Tensor | None) -> None:
        self.model.zero_grad(set_to_none=True)
        hidden = self.model(ids.reshape(-1), [LENGTH] * len(ids)).reshape(len(ids), LENGTH, -1)[:, :-1]
        logp, _ = self.model.selected_logprobs(hidden.reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1), 1.0)
        weight = torch.ones(len(ids)) if advantages is None else advantages
        loss = -(logp.reshape(len(ids), -1) * weight[:, None]).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def published(self) -> Weights:
        """The bf16 weights that engines would serve, under Hugging Face names."""
        return {name: tensor.bfloat16() for name, tensor in self.model.state().items()}

    def step(self, rate: float) -> Weights:
        """The published weights one optimizer step later, at that learning rate; the trainer's state stays
        unchanged."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        after = self.published()
        with torch.no_grad():
            for parameter, master, moments in zip(self.parameters, self._master, self._moments, strict=True):
                parameter.copy_(master)
                for key, value in moments.items():
                    self.optimizer.state[parameter][key].copy_(value)
        return after

    def walk(self, rate: float, count: int) -> Iterator[Weights]:
        """The published weights after each of `count` consecutive steps, each on new text; the trainer's state
        changes."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(count):
            self.optimizer.step()
            yield self.published()
            ids = self.text.draw(2 * GROUP)
            rewards = (ids < 8).float().mean(1).reshape(-1, GROUP)
            self._backward(ids, (rewards - rewards.mean(1, keepdim=True)).reshape(-1))


def density(before: Weights, after: Weights) -> float:
    """Share of elements whose bits differ."""
    changed = sum(int((before[name].view(torch.int16) != after[name].view(torch.int16)).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def rate_for(trained: Trained, wanted: float, *, tolerance: float = 0.03) -> tuple[float, Weights]:
    """A learning rate at which one step changes that share of the elements, and the weights after it."""
    low, high = 1e-9, 1e-3
    for _ in range(30):
        rate = (low * high) ** 0.5
        after = trained.step(rate)
        share = density(trained.before, after)
        if abs(share - wanted) <= tolerance * wanted:
            break
        low, high = (rate, high) if share < wanted else (low, rate)
    return rate, after


def mxfp8(weights: Weights) -> Weights:
    """MXFP8 as engines serve it: e4m3 elements with a power-of-two scale (e8m0) per 32 of a row; norms stay bf16."""
    out: Weights = {}
    for name, tensor in weights.items():
        if tensor.dim() < 2:
            out[name] = tensor
            continue
        out[name], out[name + precision.SCALE] = precision.quantise(tensor)
    return out
