"""Sections of learning: mid-training, the objective and its guard, the trainer, replay."""

from typing import Literal

from headrace.config.base import Section


class MidTraining(Section, frozen=True, kw_only=True):
    """Supervised training on traces, before any rollout."""

    tokens: int = 3_000_000
    batch_tokens: int = 1024
    learning_rate: float = 3e-3
    warmup: float = 0.03
    """Share of the tokens over which the learning rate rises; after it, it falls to a tenth."""
    beta2: float = 0.98
    weight_decay: float = 0.0
    quality: float = 0.35
    """Share of traces without a planted fault."""
    processes: int = 2
    """Processes that share each batch, one torch thread each. Part of the recipe: another number gives other bits."""


class Algorithm(Section, frozen=True, kw_only=True):
    """The objective, its corrections, and the guard against a collapse."""

    objective: Literal["dr_grpo"] = "dr_grpo"
    learning_rate: float = 1e-3
    warmup_steps: int = 2
    tis_clip: float = 2.0
    """Upper bound on p_trainer / p_sampler as a token's weight."""
    weighting: Literal["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"] = "truncated"
    """truncated: weights above the bound become the bound; masked: tokens beyond it or `mask_low` teach nothing;
    the others are in headrace/algorithms/corrections.py, with their papers."""
    mask_low: float = 0.5
    ratio_low: float = 0.8
    ratio_high: float = 1.2
    """The band of clipped, decoupled, sequence and sequence_masked; GSPO's own is 0.9997 to 1.0004."""
    minibatches: int = 1
    """Updates that a batch is split into; decoupled differs from truncated only from the second on."""
    kl_weight: float = 0.0
    grad_clip: float = 1.0
    max_grad_norm: float = 0.0
    """A step whose gradient norm (before clipping) is above this is refused; 0 is no limit."""
    max_k1: float = 0.0
    """A step whose |k1| (sampler against trainer, nats a token) is above this is refused; 0 is no limit."""
    guard_k1: float = 0.0
    """k1 above which a collapse is suspected (headrace/training/guard.py); 0 watches nothing."""
    guard_patience: int = 2
    """Steps in a row above it that mean a rollback when neither reward nor entropy says so at once."""
    guard_reward: float = 0.5
    """A reward below this share of the calm steps' mean agrees with k1."""
    guard_entropy: float = 2.0
    """An entropy off by this factor, up or down, agrees with k1."""
    guard_backoff: float = 0.5
    """Factor on the learning rate with each rollback."""
    length_penalty: float = 0.0
    """Weight of the concave length penalty."""
    length_k: float = 0.01
    length_q: float = 0.5
    constant_tokens: int = 64
    """Dr. GRPO's constant divisor instead of each sequence's length."""


class Trainer(Section, frozen=True, kw_only=True):
    """The trainer's process."""

    threads: int = 1
    rescore: int = 8
    """Trajectories re-scored exactly at every step (Law 5)."""
    checkpoint_every: int = 10
    micro_tokens: int = 8192


class Replay(Section, frozen=True, kw_only=True):
    """How far back a run can be replayed."""

    keep_steps: int = 1000
