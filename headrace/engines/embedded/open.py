"""Opens an embedded engine from the [engine] section: probes its device's numerics, then builds the engine."""

import asyncio

import torch

from headrace.config import Engine as EngineSection
from headrace.engines.base import UnusableEngine
from headrace.engines.embedded.engine import CACHE_BLOCKS, EmbeddedEngine
from headrace.engines.registry import EngineSetup
from headrace.kernels.block_attention import BLOCK
from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig
from headrace.policy.device import DeviceError, named
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe


async def open_engine(setup: EngineSetup) -> EmbeddedEngine:
    """An engine in this process. UnusableEngine when the device is not there, when exact mode is configured and the
    device has none, or when there is no memory or no address space for the KV cache."""
    section, policy = setup.section, setup.policy
    try:
        device = named(section.device, "[engine] device")
    except DeviceError as error:
        raise UnusableEngine(str(error)) from None
    numerics = await asyncio.to_thread(_probe, policy, section, device)
    if section.exact and not numerics.exact:
        raise UnusableEngine(
            f"[engine] exact = true, but this machine has no exact mode: {numerics.reason}; set it to false"
        )
    blocks = cache_blocks(policy, section, device)
    try:
        return EmbeddedEngine(policy, numerics, section.max_batch, section.threads, cache_blocks=blocks, device=device)
    except OSError as error:
        raise UnusableEngine(
            f"the address space for the KV cache is refused ({error.strerror}): allow more than the machine's memory "
            "(`sysctl vm.overcommit_memory=0`, no `ulimit -v`)"
        ) from None


def _probe(policy: PolicyConfig, section: EngineSection, device: torch.device) -> Numerics:
    """Probe with the engine's number of threads, because results may depend on it."""
    torch.set_num_threads(section.threads)
    return probe(policy, exact=section.exact, device=device)


def cache_blocks(policy: PolicyConfig, section: EngineSection, device: torch.device) -> int:
    """Blocks of the KV cache: on a GPU a share of its memory, but no more than all requests of both lanes can use."""
    if device.type != "cuda":
        return CACHE_BLOCKS
    free, total = torch.cuda.mem_get_info(device)
    block, most = KVCache(policy).block_bytes, 2 * section.max_batch * -(-policy.max_positions // BLOCK)
    blocks = min(int(total * section.cache_share) // block, most)
    if not blocks or blocks * block > free:
        raise UnusableEngine(
            f"[engine] cache_share = {section.cache_share} is {blocks} KV blocks of {block >> 10} KiB on a GPU of "
            f"{total >> 20} MiB, of which {free >> 20} are free; set another share"
        )
    return blocks
