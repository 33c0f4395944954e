"""Sections of the feedback loop: the branch that trains on rated sessions, and the gate that its versions must pass.

The branch is a run of its own, with its own trainer, ledger and versions: the product lane samples from the promoted
version, while the main run's trainer continues with later versions.
"""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Amount, Count, OptionalToken, Positive, Seconds, Section, Share, Token


class Feedback(Section, frozen=True, kw_only=True):
    """Training on rated sessions."""

    enabled: bool = False
    """Start a branch run that trains on the ratings of users who allow it."""
    branch: Token = "feedback"
    """The branch's name is `<run>-<branch>`. A branch keeps its version 0; another version 0 needs another name."""
    batch: Positive = 8
    """Rated sessions of a batch. Every batch makes a version, and the newest version becomes a candidate."""
    staleness: Annotated[int, Meta(ge=0, le=64)] = 1
    """Largest staleness of a token, in branch versions. Batches wait while the promoted version is older than that,
    because its sessions would be too stale."""
    baseline: Literal["class", "replay"] = "class"
    """The baseline of a rated session: the batch's rewards of its task class, or the pass rate of `replays` attempts at
    its task by the version that served it, judged by hidden tests. Sessions of clients' agents, and of prompts or files
    of users, have no hidden tests and keep the class baseline."""
    replays: Annotated[int, Meta(ge=1, le=64)] = 4
    """G: attempts of a replay. Each rating of a session that can be replayed costs so many."""
    user_cap: Count = 4
    """The most ratings of one user that count within a day; 0 is no limit."""
    followup_judge: bool = False
    """The model of [judge] decides whether an agent's next prompt calls the earlier work wrong; only for users who
    allow training. For other users, and without this key, a rule for English words decides."""
    settle_s: Seconds = 0.0
    """How long a provisional outcome waits for the final one of its session before a batch may contain it."""
    learning_rate: Amount = 0.0
    """Learning rate of the branch; 0 uses that of [algorithm]."""
    base: OptionalToken = ""
    """Set by headrace in the branch's own configuration: the run whose promoted version is version 0."""


class Gate(Section, frozen=True, kw_only=True):
    """The stages of a candidate before it serves all users: benchmark, shadow, canary stages, promotion."""

    tasks: Count = 0
    """Held-out tasks on which candidate and promoted version are compared, task by task. 0 skips the benchmark: then
    only the harm test of the canary stages can stop a worse candidate."""
    trials: Annotated[int, Meta(ge=1, le=100)] = 1
    """Trials of each of `tasks`, of both versions."""
    margin: Annotated[float, Meta(ge=-1.0, le=1.0)] = 0.0
    """The lower confidence bound of the difference in pass rates must be above this."""
    shadow: Count = 0
    """Number of clients' turns that the candidate also answers, without showing its answers, before it serves any user;
    0 skips the stage. Sessions of headrace's own agent are not shadowed."""
    canary: tuple[Share, ...] = (0.05, 0.25)
    """Share of new sessions that the candidate serves in each canary stage."""
    sessions: Positive = 50
    """Rated sessions of the candidate that each canary stage needs."""


def branch_name(run: str, section: Feedback) -> str:
    """The branch run of a run."""
    return f"{run}-{section.branch}"
