"""Sections of episodes: tasks, limits, how many at once, evaluation, the product lane."""

from typing import Literal

from headrace.config.base import Section


class Tasks(Section, frozen=True, kw_only=True):
    """Which suites."""

    suite: str = "generated/train"
    heldout: str = "generated/heldout"
    unseen: str = "generated/unseen"
    dir: str = "suites"
    """Where suites made by `headrace tasks from-sdist` lie."""


class Limits(Section, frozen=True, kw_only=True):
    """What an episode may use."""

    max_turns: int = 6
    max_turn_tokens: int = 48
    max_tokens: int = 256
    context_tokens: int = 512
    wall_s: float = 120.0
    max_parallel_calls: int = 6


class Curriculum(Section, frozen=True, kw_only=True):
    """Groups, batches, and how stale they may become."""

    group_size: int = 8
    groups_per_step: int = 8
    """P: groups of a batch."""
    staleness: int = 1
    steps: int = 40
    attempts: int = 3
    on_stale: Literal["wait", "drop"] = "wait"
    temperature: float = 1.0
    speculate: int = 0
    """So many last slots of a group are asked for once more, and the first answer counts. It favours short episodes:
    the audit says by how much."""
    canaries: float = 0.0
    """Share of groups that get a task which nobody can solve (tasks/canaries.py): who passes it cheats."""


class Rollout(Section, frozen=True, kw_only=True):
    """How many episodes at once."""

    credit: int = 48
    """Episodes of one lane that a rollout actor runs at once: the engine batches over them."""
    checkpoint_every: int = 0
    """Turns between copies of a sandbox that has its machine to itself (isolation = episode): should it be lost, the
    attempt goes on in the copy. A few MiB each; 0 keeps none, and the attempt is issued again."""


class Judge(Section, frozen=True, kw_only=True):
    """How many trajectories at once."""

    credit: int = 32
    """Trajectories that a judge works on at once; with group isolation a group's share one clone."""
    again: float = 0.05
    """Share of verdicts from shared clones that are made a second time, in a clone of their own; every suspicious one
    is, whatever the share."""


class Evaluation(Section, frozen=True, kw_only=True):
    """Held-out tasks, before and after."""

    heldout_tasks: int = 200
    unseen_tasks: int = 48
    before: bool = True
    after: bool = True


class Production(Section, frozen=True, kw_only=True):
    """The product lane: its gateway, its own rollout actors, and the scavenger that lends them."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP port of the gateway; 0 takes a free one, written to <run dir>/gateway.json."""
    tenant: str = "default"
    training_allowed: bool = False
    """Opt-in of the tenant: thumbs become scores only with it."""
    rollouts: tuple[str, ...] = ("product",)
    """Ids of the rollout actors that belong to the product and may be lent."""
    reclaim_above: int = 0
    """Sessions running or waiting above this take lent capacity back at once."""
    lend_after_s: float = 3.0
    """Quiet time before capacity is lent."""
    feedback_batch: int = 8
    """Scored thumbs that are worth an evaluation."""
    gate_tasks: int = 0
    """Held-out tasks of the gate before a version is promoted; 0 promotes nothing."""
    simulate: bool = False
    """Run simulated users against the gateway, with a day-and-night rhythm."""
    day_s: float = 40.0
    peak_requests_per_s: float = 0.5
