"""Whether the stream and the disks hold the versions of the weights that the run keeps."""

import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from headrace.bus.broker.credentials import of_run
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats import streams
from headrace.bus.nats.capacity import WEIGHTS, lacking
from headrace.config import Config, versions
from headrace.launch.checks.finding import Finding, bad, good
from headrace.launch.runs import RunError
from headrace.policy.layout import sizes
from headrace.weights.full.location import Location, NoSnapshot


async def check(config: Config) -> AsyncIterator[Finding]:
    """Findings about [weights], [bus] stream_gib and the free disk; without the disk where the size of a version is
    unknown."""
    try:
        Location.of_run(config.weights, Path(config.run.dir) / "r").open()
    except NoSnapshot as error:
        yield bad("weights.full_snapshots_url", f"{error}; install its package, or name another location")
    file_bytes = sizes.version_bytes(config)
    if not file_bytes:
        return  # a finding of the checkpoint's
    needed = versions.stream_bytes(config, file_bytes)
    chains = f"{versions.chains_kept(config)} chains"
    said = f"{chains} of deltas to versions of {size(file_bytes)} need {size(needed)} of {WEIGHTS}"
    limit, where = await _limit(config)
    if needed and 0 < limit < needed:
        yield bad("weights", f"{said}, and {where} allows {size(limit)}; {versions.how_to_fit(config)}")
    elif needed:
        yield good("weights", said)
    stored = 0 if config.bus.url else needed
    held = versions.versions_kept(config) * file_bytes
    full = 0 if config.weights.full_snapshots_url else versions.chains_kept(config) * file_bytes
    free = shutil.disk_usage(_existing(Path(config.run.dir))).free
    parts = f"{versions.versions_kept(config)} versions as files {size(held)}"
    parts += f", full snapshots {size(full)}" if full else ""
    parts += f", the streams of them {size(stored)}" if stored else ""
    if held + full + stored > free:
        lower = f"weights.keep ({config.weights.keep}) and curriculum.staleness ({config.curriculum.staleness})"
        fewer = stored + full > held and config.weights.collect_chains != 2
        less = (
            f", or set weights.collect_chains = 2 ({config.weights.collect_chains})" if fewer else f", or lower {lower}"
        )
        yield bad("run.dir", f"{config.run.dir}/ needs {parts}, and {size(free)} are free: free some space{less}")
    else:
        yield good("run.dir", f"{parts}, {size(free)} are free")


async def refuse(bus: Bus, configs: Iterable[Config]) -> None:
    """Refuse a broker that cannot hold the versions of these runs, before their actors start. RunError, BusError."""
    for config in configs:
        file_bytes = sizes.version_bytes(config)
        if lack := await lacking(bus.connection, config, file_bytes) if file_bytes else "":
            raise RunError(lack)


async def _limit(config: Config) -> tuple[int, str]:
    """The most bytes that the stream may have, and what says so; 0 where nothing does."""
    configured = config.bus.stream_bytes.get(WEIGHTS, 0)
    if configured or not config.bus.url:
        return configured, "bus.stream_gib.weights"
    try:
        keys = of_run(config.bus.credentials, config.run.id)
        async with await Bus.connect(config.bus.url, role="operator", credentials=keys or None, timeout=1.0) as bus:
            limit = (await streams.size_of(bus.connection, WEIGHTS)).limit
            return limit or await streams.storage_limit(bus.connection), "the broker"
    except (BusError, OSError):
        return 0, ""  # a finding of the network's


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def size(count: int) -> str:
    """Bytes in a unit that fits."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 28 else f"{count / (1 << 20):.2f} MiB"
