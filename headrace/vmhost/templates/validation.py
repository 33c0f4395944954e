"""Validates a template by booting two clones before it is used.

They must answer, keep the host's time, and draw different random numbers. The clock is compared by bounds: the guest
reads it between the host's sending and receiving, so a busy host widens the bounds and never fails a correct clock.
"""

import asyncio
import time

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.templates.template import Template

MEASURE_S = 0.3
"""Seconds over which the clock's rate is measured."""
RATE = 5e-3
"""Largest relative error of the guest's clock: a timeout may be off by half a per cent."""


class NoOwner:
    """The owner of a clone outside any pool."""

    def ended(self, clone: Clone, cpu_ms: float) -> None:
        """Nothing is recorded."""


async def verify(template: Template) -> float:
    """The measured rate of the clock (1.0 is exact). VmhostError when clones of the template would not work."""
    clones = [Clone(NoOwner(), template) for _ in range(2)]
    try:
        for clone in clones:
            await clone.start()
        first = await asyncio.gather(*(clone.ask({"op": "clock"}) for clone in clones))
        if first[0]["urandom"] == first[1]["urandom"]:
            raise VmhostError(f"clones of {template.manifest.name} draw the same random numbers")
        return await _rate(clones[0], template.manifest.name)
    except SandboxLost as lost:
        raise VmhostError(f"a clone of {template.manifest.name} does not answer: {lost}") from None
    finally:
        for clone in clones:
            clone.kill()
        await asyncio.gather(*(clone.gone for clone in clones))


async def _rate(clone: Clone, name: str) -> float:
    sent, read, heard = await _reading(clone)
    await asyncio.sleep(MEASURE_S)
    sent2, read2, heard2 = await _reading(clone)
    guest = read2 - read
    slowest, fastest = guest / (heard2 - sent), guest / (sent2 - heard)
    if slowest > 1 + RATE or fastest < 1 - RATE:
        raise VmhostError(f"the clock of {name} runs at {slowest:.4f} to {fastest:.4f} of the host's")
    return guest / ((sent2 + heard2 - sent - heard) / 2)


async def _reading(clone: Clone) -> tuple[int, int, int]:
    """Host before, guest, host after, in nanoseconds: the closest of five readings."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        sent = time.monotonic_ns()
        answer = await clone.ask({"op": "clock"})
        heard = time.monotonic_ns()
        if best is None or heard - sent < best[2] - best[0]:
            best = sent, int(answer["monotonic"]), heard
    assert best is not None
    return best
