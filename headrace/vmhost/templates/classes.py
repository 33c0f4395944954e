"""Classes of machines: a template by name, and the limits of a task as another machine of the same template.

A guest's memory and processors are frozen with its template, so each class has a template of its own, booted when a
task first asks for it. Memory is rounded up to `STEP_MIB`, so that tasks with odd numbers share classes. A class is
written behind the name: ``app?memory_mib=1024&vcpus=2``.
"""

import os

import msgspec

from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.errors import VmhostError

STEP_MIB = 256


def named(template: str, limits: SandboxLimits) -> str:
    """The name of a template in the class of these limits."""
    values = {
        "memory_mib": -(-limits.memory_mib // STEP_MIB) * STEP_MIB,
        "vcpus": min(limits.vcpus, len(os.sched_getaffinity(0))),
        "disk_mib": limits.disk_mib,
    }
    words = [f"{key}={value}" for key, value in values.items() if value and (key, value) != ("vcpus", 1)]
    return f"{template}?{'&'.join(words)}" if words else template


def split(name: str) -> tuple[str, SandboxLimits]:
    """A template's own name, and the limits of the class. VmhostError when the class cannot be read."""
    template, _, words = name.partition("?")
    values = dict(word.partition("=")[::2] for word in words.split("&") if word)
    try:
        limits = msgspec.convert(values, SandboxLimits, strict=False)
    except msgspec.ValidationError as error:
        raise VmhostError(f"{name!r} names no class of machines: {error}") from None
    if odd := sorted(values.keys() - {"memory_mib", "vcpus", "disk_mib"}):
        raise VmhostError(f"{name!r} names no class of machines: expected memory_mib, vcpus or disk_mib, got {odd[0]}")
    return template, limits
