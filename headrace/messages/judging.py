"""The judge's verdicts."""

import math
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.messages.base import Amount, Count, Finite, Message, Name, Share, Version, message
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import Lane
from headrace.messages.sandbox import TestOutcome
from headrace.messages.tasks import TaskRef


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The agreement of a rubric judge with labels on one criterion, from the judge's card."""

    kappa: Finite
    """Cohen's kappa."""
    low: Finite
    high: Finite
    """Its 95 % interval, by bootstrap over the pairs."""
    pairs: Count


class CriterionScore(msgspec.Struct, frozen=True, kw_only=True):
    """A rubric judge's answer about one criterion."""

    id: str
    weight: Amount
    """The weight that counted: 0 where the judge's card says that it cannot judge this criterion."""
    pitfall: bool = False
    met: Share
    """Share of votes that found the criterion met."""
    reason: str = ""
    """The first vote's reason."""
    agreement: Agreement | None = None
    """None without a card, and for a criterion that is not on it."""


class RubricScore(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of a rubric judge about one attempt."""

    rubric: str
    digest: str
    """Digest of the criteria, of the judge's model and settings, and of its instructions and card. Judges with equal
    digests are equal."""
    model: str
    model_hash: str = ""
    """sha256 of the judge model's files (`[judge] model_folder`), else of its name at the endpoint. A run has one."""
    value: Finite
    """Weights of the criteria that are met, minus those of the pitfalls, by the sum of the criteria's weights."""
    criteria: tuple[CriterionScore, ...]
    calls: Count
    """Requests that the endpoint answered for it; those answered from the cache are not among them."""
    cached: Count
    prompt_tokens: Count
    completion_tokens: Count
    cost: Amount
    """Cost by the configured prices."""


class TurnRewards(msgspec.Struct, frozen=True, kw_only=True):
    """A reward that also gives each turn one of its own."""

    final: Finite = 0.0
    """For the attempt as a whole."""
    turns: tuple[Finite, ...]
    """One for each turn of the Trajectory, in order; 0.0 where a turn earns nothing."""

    @property
    def total(self) -> float:
        """The sum of all of them."""
        return self.final + math.fsum(self.turns)


class StepScore(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one step of an attempt."""

    name: str
    value: Finite | None = None
    """The step's own reward; None where its tests gave none or did not run."""
    share: Finite = 0.0
    """Its part of the attempt's value."""
    reason: str = ""
    """Why there is no value, or why the later steps earn nothing."""


@message("score")
class Score(Message, frozen=True, kw_only=True):
    """The judge's verdict and reward for one trajectory, which it names by stream sequence."""

    run: str
    lane: Lane
    group: Name
    slot: Count
    attempt: Count
    trajectory_seq: Count
    task: TaskRef
    family: str
    judge_version: str
    verdict: Literal["passed", "failed", "cheating", "candidate_crash"]
    reward: Finite
    """The reward after penalties (length), rewards of turns included. Pass rates count verdicts, not rewards."""
    baseline: Finite | None = None
    """The value that the reward is compared with, where it does not come from the batch: the pass rate of the replays
    of a rated session. None: the other rewards of the batch."""
    by_turn: TurnRewards | None = None
    """The reward's part for each turn; None where the attempt has one reward."""
    passed: bool
    tests: tuple[TestOutcome, ...] = ()
    value: Finite | None = None
    """The number that a reward file or a checker gave; None where tests decide."""
    parts: dict[str, Finite] = {}
    """The parts whose sum is the reward, by name; a reward from outside the package is one part."""
    steps: tuple[StepScore, ...] | UnsetType = UNSET
    """The verdicts on the steps of a task with steps, in order; `value` is the sum of their shares."""
    rubric: RubricScore | None = None
    suspicions: tuple[str, ...] = ()
    again: Literal["", "same", "other"] = ""
    """Result of judging it again alone in a machine: the same verdict or another. With another the group is
    quarantined."""
    reason: str = ""
    """``refused_output``, a colon and one sentence, where the judge did not read the output of the tests."""
    plugins: tuple[Plugin, ...] = ()
    """The plugins that the reward depends on: the reward, the suite, the checker, the judge's sandbox backend, and the
    plugins of the Trajectory."""
    content: str | UnsetType = UNSET
    """The name of everything that decided the verdict (judging/reuse.py). Unset, and then not encoded, where the
    verdict counts for no other attempt."""
    same_as: Count | UnsetType = UNSET
    """The sequence of the Score whose verdict this one repeats: an examination of the same content. Unset, and then not
    encoded, where this attempt itself was examined."""
    certificate: str | UnsetType = UNSET
    """The `Certificate.task_hash` of the certificate that shows how the untouched repository is judged, which this
    attempt left: it was not examined. Unset, and then not encoded, for every other attempt."""
    oldest_version: Version = -1
    sampled_tokens: Count = 0
    turns: Count = 0
    calls: Count = 0
    wall_ms: Finite = 0.0

    @property
    def final_reward(self) -> float:
        """The reward of the attempt as a whole."""
        return self.reward if self.by_turn is None else self.by_turn.final

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The rewards of its turns; none where the attempt has one reward."""
        return () if self.by_turn is None else self.by_turn.turns


@message("certificate")
class Certificate(Message, frozen=True, kw_only=True):
    """The examinations of one task by the judge's own code. It holds for the task's bytes as `task_hash` names them."""

    task: TaskRef
    task_hash: str
    """sha256 of both sides of the task."""
    judge_version: str
    plugins: tuple[Plugin, ...] = ()
    """The suite's source, checker and sandbox backend, where they come from outside: name, version and source hash."""
    backend: str = ""
    """The sandbox backend of the examinations."""
    verdict: Literal["certified", "refused", "uncertifiable"]
    """``uncertifiable``: there is no known solution to examine."""
    reasons: tuple[str, ...] = ()
    """Why the task is not certified."""
    gold_runs: Count = 0
    gold_passed: Count = 0
    """Examinations of the known solution, and how many passed; both numbers differ for a flaky task."""
    noop: str = ""
    """The decision on the untouched repository."""
    stub: str = ""
    """The decision on the solution with empty function bodies; empty where it changes no function."""
    mutants: Count = 0
    killed: Count = 0
    """Mutations of the solution's changed functions, and how many of them the tests refuse."""
    equivalent: Count = 0
    """Further mutations that the suite itself shows to behave like the solution; `mutants` does not count them."""
    survivors: tuple[str, ...] = ()
    """The mutations that pass. Where a suite cannot compare behaviour, some of them may behave like the solution."""
    notes: tuple[str, ...] = ()
    """Weaknesses of the tests that do not void the certificate, such as a share of refused mutations below 80 %."""
    leaks: tuple[str, ...] = ()
    """Parts of the solution or the hidden tests that the agent can read."""
    risks: tuple[str, ...] | UnsetType = UNSET
    """Why a pass may prove no repair. Training on such a task needs `[tasks] at_risk`. Unset it is not encoded, so
    older certificates stay as they are."""
    output: str | UnsetType = UNSET
    """The end of the output that explains why the task is not certified: of the known solution's program, or of a test
    run; at most 4,000 characters, fit for a terminal. Unset it is not encoded, so that older files stay valid."""


@message("certify_asked")
class CertifyAsked(Message, frozen=True, kw_only=True):
    """A request to examine a task before it is issued; the answer is its Certificate."""

    run: str
    task: TaskRef
    task_hash: str
    """sha256 of both sides of the sender's copy of the task."""


class SuiteCertificates(msgspec.Struct, frozen=True, kw_only=True):
    """The certificates of a suite, as they lie in a file."""

    suite: str
    source: str = ""
    """Hash of a generated suite's templates; its certificates are of a sample. Empty: every task has a certificate."""
    address: str = ""
    """sha256 of the certificates."""
    certificates: tuple[Certificate, ...]
