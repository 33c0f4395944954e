"""From the [engine] section to an embedded engine: probe this machine's numerics, then build it."""

import asyncio

import torch

from headrace.config import Engine as EngineSection
from headrace.engines.base import UnusableEngine
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.engines.registry import EngineSetup
from headrace.policy.config import PolicyConfig
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe


async def open_engine(setup: EngineSetup) -> EmbeddedEngine:
    """An engine in this process. UnusableEngine when exact mode is asked for and this machine has none."""
    found = await asyncio.to_thread(_probe, setup.policy, setup.section)
    if setup.section.exact and not found.exact:
        raise UnusableEngine(f"exact mode can't be had on this machine: {found.reason}")
    return EmbeddedEngine(setup.policy, found, setup.section.max_batch, setup.section.threads)


def _probe(policy: PolicyConfig, section: EngineSection) -> Numerics:
    """Under the threads that the engine will have: they are part of the arithmetic."""
    torch.set_num_threads(section.threads)
    return probe(policy, exact=section.exact)
