"""The typed configuration of a run, read from TOML: one section per part of the system, one attribute per key.

Unknown keys, wrong types and missing files are refused with the key, its line and the expected value. Other packages
import everything from here; each module contains the sections of one part of the system.
"""

from headrace.config.base import ConfigError, Section
from headrace.config.episodes import (
    AgentLimits,
    Curriculum,
    Evaluation,
    Judge,
    Limits,
    Production,
    Rollout,
    Tasks,
    Tools,
)
from headrace.config.feedback import Feedback, Gate, branch_name
from headrace.config.harnesses import Harness, Program
from headrace.config.nodes import Bus, Dashboard, Environment, Metrics, Processes, Run, Sandboxes, Search
from headrace.config.policy import Engine, Numerics, Policy, Weights
from headrace.config.reading import load, parse
from headrace.config.training import Algorithm, Mesh, MidTraining, Replay, Trainer
from headrace.config.tree import Config, branch_config

__all__ = [
    "AgentLimits",
    "Algorithm",
    "Bus",
    "Config",
    "ConfigError",
    "Curriculum",
    "Dashboard",
    "Engine",
    "Environment",
    "Evaluation",
    "Feedback",
    "Gate",
    "Harness",
    "Judge",
    "Limits",
    "Mesh",
    "Metrics",
    "MidTraining",
    "Numerics",
    "Policy",
    "Processes",
    "Production",
    "Program",
    "Replay",
    "Rollout",
    "Run",
    "Sandboxes",
    "Search",
    "Section",
    "Tasks",
    "Tools",
    "Trainer",
    "Weights",
    "branch_config",
    "branch_name",
    "load",
    "parse",
]
