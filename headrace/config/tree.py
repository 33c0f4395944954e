"""The whole of it: one attribute per section."""

from headrace.config.base import Section
from headrace.config.episodes import Curriculum, Evaluation, Judge, Limits, Production, Rollout, Tasks
from headrace.config.nodes import Bus, Dashboard, Environment, Metrics, Processes, Run, Search
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
    search: Search = Search()
    rollout: Rollout = Rollout()
    judge: Judge = Judge()
    tasks: Tasks = Tasks()
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
