"""Whether this machine has the devices of [trainer] and [engine], and whether the trainer's memory plan fits."""

import os
from collections.abc import Iterator, Sequence

from headrace.config import Config
from headrace.launch.checks import servers
from headrace.launch.checks.finding import Finding, Roles, bad, gib, good, wanted
from headrace.launch.processes import process_groups
from headrace.machine_memory import available_bytes
from headrace.metrics.gpus import Gpu, gpus
from headrace.policy.config import CheckpointError
from headrace.policy.layout import hugging_face, sizes
from headrace.training import memory_plan

ACTOR = {"engine": "rollout actor", "trainer": "trainer"}
"""The actor that computes on a section's device."""
CAUSES = 3
"""Largest causes that a line names."""


def check(config: Config, roles: Roles = frozenset()) -> Iterator[Finding]:
    """Findings about the devices of [trainer] and [engine], and the bytes that the trainer needs on each of its own.
    roles: this machine's; empty: all."""
    return on_devices(config, visible(gpus()), roles)


def on_devices(config: Config, devices: Sequence[Gpu], roles: Roles = frozenset()) -> Iterator[Finding]:
    """As `check`, on a machine with these GPUs."""
    section, trains, samples = config.trainer, wanted(roles, "trainer"), wanted(roles, "rollout")
    places = [("engine", config.engine.device)] if samples and config.engine.kind == "embedded" else []
    for part, device in [*places, *([("trainer", section.device)] if trains else [])]:
        if device.startswith("cuda") and len(devices) <= int(device.partition(":")[2] or 0):
            yield bad(
                f"{part}.device",
                f"{device} is not there: this machine has {len(devices)} GPUs; set {part}.device = 'cpu', or start the "
                f"{ACTOR[part]} on a host with a GPU",
            )
            if part == "trainer":
                return
    local = section.machine_ranks
    cuda = bool(devices) and section.device != "cpu"
    first = int(section.device.partition(":")[2] or 0)
    ranks = range(first, first + local) if trains and cuda else range(0)
    if samples:
        yield from servers.check(config, devices, ranks)
    if not trains:
        return
    if cuda and local > len(devices):
        here = "" if section.nodes == 1 else f" of each of {section.nodes} nodes"
        yield bad(
            "trainer.mesh",
            f"{local} processes{here} need a GPU each, this machine has {len(devices)}; lower trainer.mesh.shard",
        )
        return
    try:
        policy = hugging_face.of_run(config)
    except (CheckpointError, ValueError, OSError):
        return  # a finding of the checkpoint's or of the section's
    layout = memory_plan.layout_of(config)
    layout = layout._replace(offload=layout.offload and cuda, cpu=not cuda)
    held = shared(config, devices) if cuda and samples else {}
    free = min(devices[n].free - held.get(n, 0) for n in ranks) if cuda else (available_bytes() or 0) // local
    device = ("a GPU" if cuda else "memory") + (f" of each of {local} processes" if local > 1 else "")
    beside = f" beside {gib(max(held.values()))} of the engine" if any(n in held for n in ranks) else ""
    limit = int((1.0 - memory_plan.SPARE) * free)
    spare = f"{gib(free)} are free{beside}, {memory_plan.SPARE:.0%} of which stay free for what no plan counts"
    rough = memory_plan.rough(policy, layout)
    if rough <= limit and not layout.offload:
        yield good("trainer", f"it needs less than {gib(rough)} of {device}, {spare}")
        return
    try:
        needed = memory_plan.plan(policy, layout)
    except ValueError:
        return  # a finding of the section's
    largest = sorted(needed.causes.items(), key=lambda item: -item[1])[:CAUSES]
    causes = ", ".join(f"{name} {gib(value)}" for name, value in largest if value)
    if needed.total <= limit:
        yield good("trainer", f"it needs {gib(needed.total)} of {device} ({causes}), {spare}")
        if layout.offload:
            yield _host(needed.host.total * local)
        return
    other = memory_plan.fitting(policy, layout, free)
    longer = layout.longest > layout.tokens
    fix = f"lower {'limits.context_tokens' if longer else 'trainer.micro_tokens'}, or choose a smaller policy"
    if other is not None:
        before, after = memory_plan.settings(layout), memory_plan.settings(other)
        changed = (f"{key} = {value}".lower() for key, value in after.items() if before.get(key) != value)
        fix = f"set {', '.join(changed)}"
        if other.offload and not layout.offload:
            host = memory_plan.plan(policy, other).host.total * local
            fix += f" (it needs {gib(host)} of the host's memory, {gib(available_bytes() or 0)} are free)"
    if beside:
        fix += f", or lower engine.cache_share ({config.engine.cache_share:g})"
    yield bad("trainer", f"it needs {gib(needed.total)} of {device} ({causes}), {spare}; {fix}")


def shared(config: Config, devices: Sequence[Gpu]) -> dict[int, int]:
    """GPU to the bytes that embedded engines hold there: two copies of the weights and the cache of each rollout
    actor."""
    section = config.engine
    if section.kind != "embedded" or section.device == "cpu" or not devices:
        return {}
    there = int(section.device.partition(":")[2] or 0)
    actors = [name for group in process_groups(config) for name in group if name.partition(":")[0] == "rollout"]
    each = 2 * sizes.version_bytes(config) + int(section.cache_share * devices[there].total)
    return {there: len(actors) * each}


def _host(needed: int) -> Finding:
    """Whether the host's memory holds what `trainer.offload` moves there. needed: bytes of all processes."""
    free = available_bytes() or 0
    said = f"optimizer needs {gib(needed)} of the host's memory, {gib(free)} are free"
    if needed <= free:
        return good("trainer.offload", said)
    return bad("trainer.offload", f"{said}; set trainer.offload = 'none', or algorithm.moments = 'eight_bit'")


def visible(devices: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves to a process; names instead of numbers keep their count."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return devices
    listed = [name for name in names.split(",") if name]
    if all(name.isdigit() for name in listed):
        return tuple(devices[int(name)] for name in listed if int(name) < len(devices))
    return devices[: len(listed)]
