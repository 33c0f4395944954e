"""Is a template what its clones need it to be? Two clones answer for it before anybody gets one.

They must answer, run at the host's rate, and not draw the same random numbers. The clock is compared by bounds: the
guest's reading lies between sending and hearing, so a busy host widens the bounds and never makes a good clock bad.
"""

import asyncio
import time

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.clone import Clone
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.levels import Nobody
from headrace.vmhost.template import Template

WATCH_S = 0.3
"""How long the clock is watched."""
RATE = 5e-3
"""Largest error of the guest's clock: a timeout that is off by half a per cent harms nobody."""


async def verify(template: Template) -> float:
    """The clock's rate as far as it could be told (1.0 is right). VmhostError when clones of it would misbehave."""
    clones = [Clone(Nobody(), template) for _ in range(2)]
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
    await asyncio.sleep(WATCH_S)
    sent2, read2, heard2 = await _reading(clone)
    guest = read2 - read
    slowest, fastest = guest / (heard2 - sent), guest / (sent2 - heard)
    if slowest > 1 + RATE or fastest < 1 - RATE:
        raise VmhostError(f"the clock of {name} runs at {slowest:.4f} to {fastest:.4f} of the host's")
    return guest / ((sent2 + heard2 - sent - heard) / 2)


async def _reading(clone: Clone) -> tuple[int, int, int]:
    """Host before, guest, host after, in nanoseconds: the tightest of five."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        sent = time.monotonic_ns()
        answer = await clone.ask({"op": "clock"})
        heard = time.monotonic_ns()
        if best is None or heard - sent < best[2] - best[0]:
            best = sent, int(answer["monotonic"]), heard
    assert best is not None
    return best
