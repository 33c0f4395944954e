"""Certificates: what the judge found about a task's own tests before a policy trains on the task."""

from typing import Literal

import msgspec

from headrace.messages.base import Message, message
from headrace.messages.plugins import Plugin
from headrace.messages.tasks import TaskRef


@message("certificate")
class Certificate(Message, frozen=True, kw_only=True):
    """The examinations of one task by the judge's own code. It holds for the task's bytes as `task_hash` names them."""

    task: TaskRef
    task_hash: str
    """sha256 of both sides of the task."""
    judge_version: str
    plugins: tuple[Plugin, ...] = ()
    """The suite's source and checker, where they come from outside: name, version and source hash."""
    backend: str = ""
    """The sandbox backend of the examinations."""
    verdict: Literal["certified", "refused", "uncertifiable"]
    """``uncertifiable``: there is no known solution to examine."""
    reasons: tuple[str, ...] = ()
    """Why the task is not certified."""
    gold_runs: int = 0
    gold_passed: int = 0
    """Examinations of the known solution, and how many passed; both numbers differ for a flaky task."""
    noop: str = ""
    """The decision on the untouched repository."""
    stub: str = ""
    """The decision on the solution with empty function bodies; empty where it changes no function."""
    mutants: int = 0
    killed: int = 0
    """Mutations of the solution's changed functions, and how many of them the tests refuse."""
    equivalent: int = 0
    """Further mutations that the suite itself shows to behave like the solution; `mutants` does not count them."""
    survivors: tuple[str, ...] = ()
    """The mutations that pass. Where a suite cannot compare behaviour, some of them may behave like the solution."""
    notes: tuple[str, ...] = ()
    """Weaknesses of the tests that do not void the certificate, such as a share of refused mutations below 80 %."""
    leaks: tuple[str, ...] = ()
    """Parts of the solution or the hidden tests that the agent can read."""


class SuiteCertificates(msgspec.Struct, frozen=True, kw_only=True):
    """The certificates of a suite, as they lie in a file."""

    suite: str
    source: str = ""
    """Hash of a generated suite's templates; its certificates are of a sample. Empty: every task has a certificate."""
    address: str = ""
    """sha256 of the certificates."""
    certificates: tuple[Certificate, ...]
