"""Opens an engine from the [engine] section: attaches to the server at `url`, or starts one with `python`."""

from pathlib import Path

from headrace.config import Engine as EngineSection
from headrace.engines.registry import EngineSetup
from headrace.engines.sglang.compatibility import IncompatibleServer
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.requirements import problems
from headrace.engines.sglang.server import Server, free_port
from headrace.policy.config import PolicyConfig


async def open_engine(setup: EngineSetup) -> SglangEngine:
    """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
    await setup.tokenizer()  # the server loads a checkpoint folder, tokenizer included
    engine = opened(setup.section, setup.policy, setup.run, setup.id)
    await engine.attach()
    return engine


def opened(section: EngineSection, policy: PolicyConfig, run: Path, id: str) -> SglangEngine:
    """The engine of the rollout actor `id`; a server is started with its first version.

    run: the run's folder, for the tokenizer and the server's log. IncompatibleServer names the key to change.
    """
    for key, text in problems(section):
        raise IncompatibleServer(f"engine.{key}: {text}")
    server = None
    if section.python:
        args = ["--dtype", policy.dtype, "--max-running-requests", str(section.max_batch), *section.args]
        if policy.experts:
            args.append("--enable-return-routed-experts")
        log = run / "logs" / f"sglang-{id}.log"
        server = Server(section.python, free_port(), args, log, sparse=section.sparse)
    tokenizer = run / "tokenizer.json"
    return SglangEngine(
        policy,
        Path(section.stage_dir) / f"headrace-{run.name}-{id}",
        url=section.url,
        server=server,
        tokenizer=tokenizer if tokenizer.exists() else None,
        max_batch=section.max_batch,
        swap=section.swap,
        sparse=section.sparse,
        deadline_s=section.deadline_s,
        start_s=section.start_s,
    )
