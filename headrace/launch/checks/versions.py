"""Whether the stream and the disks hold the versions of the weights that the run keeps."""

import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from headrace.bus.broker.credentials import of_run
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats import streams
from headrace.bus.nats.capacity import WEIGHTS, lacking
from headrace.config import Config, versions
from headrace.launch.checks.finding import Finding, Roles, bad, good, wanted
from headrace.launch.runs import RunError
from headrace.policy.layout import sizes
from headrace.weights.full.location import Location, NoSnapshot


async def check(config: Config, roles: Roles = frozenset()) -> AsyncIterator[Finding]:
    """Findings about [weights], [bus] stream_gib and the free disk; without the disk where the size of a version is
    unknown. roles: as in `host.check`."""
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
    for finding in _records(config):
        yield finding
    for finding in _memory(config, file_bytes):
        yield finding
    yield _disk(config, file_bytes, 0 if config.bus.url else needed, roles)


def _records(config: Config) -> Iterator[Finding]:
    """Whether [bus] stream_gib leaves the streams of records as much as the kept steps may need."""
    for name, most in sizes.record_bytes(config).items():
        key, limit = f"bus.stream_gib.{name[3:].lower()}", config.bus.stream_bytes.get(name, 0)
        said = f"the records of the kept steps need up to {size(most)} of {name}"
        if 0 < limit < most:
            yield bad(key, f"{said}, and it allows {size(limit)}: raise it, lower replay.keep_steps or set keep_gib")
        elif limit:
            yield good(key, said)


def _files(config: Config, file_bytes: int) -> tuple[int, str, str]:
    """Bytes of the versions on this node, what they are, and how to have fewer."""
    held = versions.versions_kept(config)
    return held * file_bytes, f"{held} versions as files", f"lower weights.keep ({config.weights.keep})"


def _memory(config: Config, file_bytes: int) -> Iterator[Finding]:
    """Whether `weights.memory_dir` holds the versions of this node."""
    key, folder = "weights.memory_dir", Path(config.weights.memory_dir)
    if not config.weights.memory_dir:
        return
    if not folder.is_dir():
        yield bad(key, f"there is no folder {folder}: create it, or name another")
        return
    needed, what, fewer = _files(config, file_bytes)
    free = shutil.disk_usage(folder).free
    said = f"{folder} needs {what} of {size(file_bytes)}: {size(needed)}, and {size(free)} are free"
    enlarge = "enlarge it (`mount -o remount,size=...`, `--shm-size` of a container)"
    yield good(key, said) if needed <= free else bad(key, f"{said}: {enlarge}, or {fewer}")


def _disk(config: Config, file_bytes: int, stream: int, roles: Roles) -> Finding:
    """Whether the disk holds what grows with the run. stream: bytes of the deltas in a broker's store there."""
    parts = [] if config.weights.memory_dir else [_files(config, file_bytes)]
    if not config.weights.full_snapshots_url:
        chains = f"set weights.collect_chains = 2 ({config.weights.collect_chains})"
        parts.append((versions.chains_kept(config) * file_bytes, "full snapshots", chains))
        parts.append((stream, "the streams of them", chains))
    steps = versions.steps_kept(config)
    keep = f"lower replay.keep_steps ({config.replay.keep_steps})"
    if wanted(roles, "trainer"):
        count, every = versions.checkpoints_kept(config), config.trainer.checkpoint_every
        advice = f"{keep} or raise trainer.checkpoint_every ({every})"
        parts.append((count * sizes.checkpoint_bytes(config), f"{count} checkpoints", advice))
    if not config.bus.url:
        records = sum(sizes.record_bytes(config).values())
        parts.append((records, f"the records of {steps} steps and of those to come", f"{keep} or set replay.keep_gib"))
    total, free = sum(each for each, _, _ in parts), shutil.disk_usage(_existing(Path(config.run.dir))).free
    said = ", ".join(f"{name} {size(each)}" for each, name, _ in parts if each)
    if total <= free:
        return good("run.dir", f"{said}: {size(total)}, {size(free)} are free")
    _, _, fix = max(parts)
    return bad(
        "run.dir",
        f"{config.run.dir}/ needs {said}: {size(total)}, and {size(free)} are free: free some space, or {fix}",
    )


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
