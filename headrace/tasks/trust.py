"""Refuses to train on suites whose verdicts come from printed lines, unless the configuration allows it.

Every parser of logs accepts ``PASSED a.py::test`` from a candidate. Evaluation may use such suites; a policy in
training would learn to print that line.
"""

from typing import Literal

from headrace.tasks.base import Suite

Trust = Literal["report", "log"]


def trust_of(suite: Suite) -> Trust:
    """``log`` where a task of the suite says so; a suite without the attribute ``trust`` reports its tests."""
    trust: Trust = getattr(suite, "trust", "report")
    return trust


def refusal(suite: Suite, train_on_logs: bool) -> str:
    """Why the suite may not be trained on, in one sentence; empty when it may."""
    if trust_of(suite) == "report" or train_on_logs:
        return ""
    return (
        f"suite {suite.name} reads its verdicts from logs, which a policy in training can forge; "
        "set [tasks] train_on_logs = true to train on it nevertheless"
    )
