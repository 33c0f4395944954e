"""Opens an embedded engine from the [engine] section: probes this machine's numerics, then builds the engine."""

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
    """An engine in this process. UnusableEngine when exact mode is configured and this machine has none, or when the
    system refuses the address space of the KV cache."""
    numerics = await asyncio.to_thread(_probe, setup.policy, setup.section)
    if setup.section.exact and not numerics.exact:
        raise UnusableEngine(
            f"[engine] exact = true, but this machine has no exact mode: {numerics.reason}; set it to false"
        )
    try:
        return EmbeddedEngine(setup.policy, numerics, setup.section.max_batch, setup.section.threads)
    except OSError as error:
        raise UnusableEngine(
            f"the address space for the KV cache is refused ({error.strerror}): allow more than the machine's memory "
            "(`sysctl vm.overcommit_memory=0`, no `ulimit -v`)"
        ) from None


def _probe(policy: PolicyConfig, section: EngineSection) -> Numerics:
    """Probe with the engine's number of threads, because results may depend on it."""
    torch.set_num_threads(section.threads)
    return probe(policy, exact=section.exact)
