"""Task suites: generated bug-fixing repositories, suites made from real packages, and traces to mid-train on.

A task has two sides (`messages.tasks`): the agent's side, and the oracle that only the judge may open.
"""

from headrace.tasks.base import Suite, UnknownSuite
from headrace.tasks.suites import open_suite

__all__ = ["Suite", "UnknownSuite", "open_suite"]
