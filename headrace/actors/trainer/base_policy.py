"""Version 0 of a branch: a promoted version of the run that it branches from, and that run's renderer bundle."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.actors.trainer.initial_policy import BUNDLE
from headrace.bus.connection import Bus
from headrace.bus.errors import Unrecoverable
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime import logging
from headrace.config import Config
from headrace.messages.product import Branch, branch_key
from headrace.messages.weights import WeightHead
from headrace.weights import chain, heads
from headrace.weights.full.location import Location
from headrace.weights.full.snapshots import FullSnapshots
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError


class Base(NamedTuple):
    """The file with the base version's bytes, and the hash that version 0 must have."""

    file: Path
    state_hash: str
    """Empty if the published bytes were rounded, because the trainer's own weights have another hash."""

    def check(self, state_hash: str) -> None:
        """Unrecoverable when version 0 has other bytes than the base version."""
        if self.state_hash and state_hash != self.state_hash:
            raise Unrecoverable(
                f"version 0 of the branch has state {state_hash[:12]}, its base version {self.state_hash[:12]}: "
                "the branch needs the [policy] section of the run that it branches from"
            )


async def fetch(bus: Bus, config: Config, run: str, folder: Path) -> Base | None:
    """The base of a branch; None for a run that is not a branch. Waits until the feedback actor names the base version.
    Unrecoverable."""
    if not config.feedback.base:
        return None
    record = await _record(bus, run)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "base.safetensors"
    try:
        trust = Trust.load(bus.credentials, config.weights.publishers, unsigned=config.weights.unsigned)
        head = await _head(bus, record, trust)
        if not file.exists():
            location = Location.of_run(config.weights, Path(config.run.dir) / record.base_run)
            snapshots = FullSnapshots(location, None, _tell)
            await chain.obtain(bus, head, file, lambda version, state_hash: None, trust=trust, fetch=snapshots.fetch)
    except WeightError as error:
        raise Unrecoverable(f"version {record.base_version} of run {record.base_run}: {error}") from error
    if not (folder / BUNDLE).exists():
        bundle = await renderer_bundles.fetch(bus, record.base_run)
        if bundle is None:
            raise Unrecoverable(f"run {record.base_run} has no renderer bundle in HR_RENDERER")
        (folder / "tokenizer.json").write_text(bundle.tokenizer_json, encoding="utf-8")
        (folder / BUNDLE).write_bytes(msgspec.json.encode(bundle))
    return Base(file, "" if head.source_hash else head.state_hash)


async def _record(bus: Bus, run: str) -> Branch:
    values = await bus.kv("HR_PRODUCT")
    async for _, value, _ in values.watch(branch_key(run)):
        if isinstance(value, Branch):
            return value
    raise Unrecoverable(f"the bucket HR_PRODUCT was closed before {run} had a base version")


async def _tell(text: str) -> None:
    logging.get().warning("copy_failed", text=text)


async def _head(bus: Bus, record: Branch, trust: Trust | None) -> WeightHead:
    async for _, head in heads.counting(bus, heads.Heads(record.base_run, trust)):
        if (head.version, head.state_hash) == (record.base_version, record.base_hash):
            return head
    raise WeightError("no valid head record names it")
