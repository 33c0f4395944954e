"""The whole configuration: one attribute per section; and the configuration of a branch."""

import msgspec

from headrace.config.base import Section, Token
from headrace.config.episodes import Curriculum, Evaluation, Judge, Limits, Production, Rollout, Tasks, Tools
from headrace.config.feedback import Feedback, Gate
from headrace.config.harnesses import Harness, Program
from headrace.config.nodes import Bus, Dashboard, Environment, Metrics, Processes, Run, Sandboxes, Search
from headrace.config.policy import Engine, Numerics, Policy, Weights
from headrace.config.training import Algorithm, MidTraining, Replay, Trainer


class Config(Section, frozen=True, kw_only=True):
    """A run's configuration."""

    run: Run = Run()
    bus: Bus = Bus()
    processes: Processes = Processes()
    policy: Policy = Policy()
    engine: Engine = Engine()
    environment: Environment = Environment()
    sandboxes: Sandboxes = Sandboxes()
    search: Search = Search()
    rollout: Rollout = Rollout()
    judge: Judge = Judge()
    tasks: Tasks = Tasks()
    tools: Tools = Tools()
    harness: Harness = Harness()
    harnesses: dict[Token, Program] = {}
    limits: Limits = Limits()
    curriculum: Curriculum = Curriculum()
    algorithm: Algorithm = Algorithm()
    numerics: Numerics = Numerics()
    mid_training: MidTraining = MidTraining()
    trainer: Trainer = Trainer()
    replay: Replay = Replay()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    production: Production = Production()
    metrics: Metrics = Metrics()
    dashboard: Dashboard = Dashboard()
    feedback: Feedback = Feedback()
    gate: Gate = Gate()


def branch_config(config: Config, run: str) -> Config:
    """The configuration of a run's branch: its trainer takes a batch as soon as it is closed, and never finishes."""
    replace = msgspec.structs.replace
    section = config.feedback
    algorithm = replace(
        config.algorithm, baseline="class", learning_rate=section.learning_rate or config.algorithm.learning_rate
    )
    return replace(
        config,
        run=replace(config.run, id=""),
        feedback=replace(section, enabled=False, base=run),
        curriculum=replace(
            config.curriculum, groups_per_step=section.batch, staleness=section.staleness, steps=2**31 - 1
        ),
        algorithm=algorithm,
        mid_training=replace(config.mid_training, tokens=0),
    )
