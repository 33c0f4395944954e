"""Opens an engine from the [engine] section: attaches to the server at `url`, or starts servers with `python`."""

from pathlib import Path

from headrace.config import Engine as EngineSection
from headrace.engines.registry import EngineSetup
from headrace.engines.sglang.compatibility import IncompatibleServer
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.fleet import Fleet
from headrace.engines.sglang.requirements import problems
from headrace.engines.sglang.server import Server
from headrace.policy.config import PolicyConfig


async def open_engine(setup: EngineSetup) -> SglangEngine | Fleet:
    """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
    await setup.tokenizer()  # the server loads a checkpoint folder, tokenizer included
    engine = opened(setup.section, setup.policy, setup.run, setup.id)
    if isinstance(engine, SglangEngine):
        await engine.attach()
    return engine


def opened(section: EngineSection, policy: PolicyConfig, run: Path, id: str) -> SglangEngine | Fleet:
    """The engine of the rollout actor `id`; servers are started with their first version.

    run: the run's folder, for the tokenizer and the servers' logs. IncompatibleServer names the key to change.
    """
    for key, text in problems(section):
        raise IncompatibleServer(f"engine.{key}: {text}")
    if section.servers == 1:
        return _engine(section, policy, run, id, next(iter(section.server_devices), None))
    devices = section.server_devices or (None,) * section.servers
    return Fleet([_engine(section, policy, run, f"{id}-{index}", seen) for index, seen in enumerate(devices)])


def _engine(section: EngineSection, policy: PolicyConfig, run: Path, id: str, devices: str | None) -> SglangEngine:
    """The engine of one server. devices: the GPUs that it sees; None for all."""
    server = None
    most = -(-section.max_batch // section.servers)
    if section.python:
        args = ["--dtype", policy.dtype, "--max-running-requests", str(most), *section.args]
        if policy.experts:
            args.append("--enable-return-routed-experts")
        log = run / "logs" / f"sglang-{id}.log"
        server = Server(section.python, args, log, sparse=section.sparse, devices=devices)
    tokenizer = run / "tokenizer.json"
    return SglangEngine(
        policy,
        Path(section.stage_dir) / f"headrace-{run.name}-{id}",
        url=section.url,
        server=server,
        tokenizer=tokenizer if tokenizer.exists() else None,
        max_batch=most,
        swap=section.swap,
        sparse=section.sparse,
        weights=section.weights,
        start_s=section.start_s,
    )
