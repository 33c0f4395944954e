"""Whether the SGLang servers of a rollout actor have GPUs of their own that hold the weights."""

from collections.abc import Iterator, Sequence

from headrace.config import Config, Engine
from headrace.engines.registry import ENGINES
from headrace.engines.server.options import ServerOptions
from headrace.launch.checks.finding import Finding, bad, gib, good
from headrace.metrics.gpus import Gpu
from headrace.policy.layout import sizes
from headrace.registry import PluginError

STATIC = 0.8
"""Share of a GPU that the weights may have: SGLang takes some nine tenths, and keys and values need the rest."""
SPLITS = ("--tp-size", "--tp", "--tensor-parallel-size")


def check(config: Config, devices: Sequence[Gpu], ranks: range) -> Iterator[Finding]:
    """Findings about servers that a rollout actor of this machine starts. ranks: the GPUs of a trainer here."""
    options = options_of(config.engine)
    if options is None or not options.python:
        return
    weights = sizes.version_bytes(config)
    if "cpu" not in options.args and (devices or options.server_devices):
        yield from _gpus(options, devices, ranks, weights)


def _gpus(options: ServerOptions, devices: Sequence[Gpu], ranks: range, weights: int) -> Iterator[Finding]:
    key = "engine.options.server_devices"
    named = [seen.replace(" ", "").split(",") for seen in options.server_devices]
    split = split_of(options.args)
    free = [str(number) for number in range(len(devices)) if number not in ranks]
    groups = named or [[str(number) for number in range(split)]]  # a server that names none starts at the first
    example = ", ".join(f'"{",".join(free[n : n + split])}"' for n in range(0, split * options.servers, split))
    fix = f"set {key} = [{example}]" if len(free) >= split * options.servers else "lower trainer.mesh.shard"
    used = [each for group in groups for each in group]
    if taken := [each for each in used if each.isdecimal() and int(each) in ranks]:
        yield bad(key, f"GPU {taken[0]} belongs to the trainer, whose ranks have {ranks[0]} to {ranks[-1]}: {fix}")
    elif absent := [each for each in used if each.isdecimal() and int(each) >= len(devices)]:
        yield bad(key, f"GPU {absent[0]} is not there, this machine has {len(devices)}: {fix}")
    elif short := [group for group in groups if len(group) < split]:
        yield bad(
            "engine.options.args",
            f"--tp-size {split} needs as many GPUs of a server, {key} gives {len(short[0])}: change one of them",
        )
    elif devices and weights / split > STATIC * min(gpu.total for gpu in devices):
        yield bad(
            "engine.options.args",
            f"weights of {gib(weights)} over {split} GPUs of {gib(devices[0].total)} leave no memory for keys and "
            "values: raise --tp-size in engine.options.args",
        )
    else:
        yield good("engine", f"{options.servers} servers with {split} GPUs each")


def options_of(section: Engine) -> ServerOptions | None:
    """The options of an engine that starts servers; None of another, and of options that cannot be read, which are a
    finding of the engine's."""
    try:
        options = ENGINES.options(section.kind, section.options, "engine.options")
    except PluginError:
        return None
    return options if isinstance(options, ServerOptions) else None


def split_of(args: Sequence[str]) -> int:
    """The tensor parallelism in the arguments of a server."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in SPLITS and (text := value if equals else after).isdecimal():
            return max(1, int(text))
    return 1
