"""Verdicts: rules for diffs and episodes, examinations in fresh sandboxes, and scores."""

from headrace.judging.candidates import Candidate
from headrace.judging.examination import Options, examine
from headrace.judging.machines import HostMachines
from headrace.judging.verdicts import Verdict

__all__ = ["Candidate", "HostMachines", "Options", "Verdict", "examine"]
