"""`headrace weights`: the chain of published versions, read, proved, folded, exported and compared.

What only reads does so as the operator. `fold` writes as the sender does and needs its key; `collect` reads so too, and
removes as the trainer, whom alone the broker lets purge.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import Weights, load
from headrace.launch.output import complain, say
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.weights.signing import Trust

ROLES = {"fold": "weight_sync"}
"""In whose name a command acts; every other one as the operator."""


async def execute(bus: "Bus", folder: RunDir, args: argparse.Namespace) -> int:
    """Run one of the commands. RunError, code 1, for a version that is not there or cannot be trusted."""
    from headrace.weights import report
    from headrace.weights.signing import Trust
    from headrace.weights.state import WeightError

    section = load(folder.config).weights if folder.config.is_file() else Weights()
    try:
        trust = Trust.load(bus.credentials, section.publishers, unsigned=section.unsigned or args.unsigned)
        match args.weights_command:
            case "log":
                say(await report.log(bus, folder.id))
            case "show":
                say(await report.show(bus, folder.id, args.version))
            case "verify":
                return await _verify(bus, folder, args.version, trust)
            case "fold":
                await _fold(bus, folder, args.count, section, trust)
            case "export":
                await _export(bus, folder, args.version, args.path, trust)
            case "diff":
                await _diff(bus, folder, args.older, args.newer, trust)
            case "collect":
                await _collect(bus, folder, args.chains, trust)
    except (WeightError, LookupError) as error:
        raise RunError(str(error), 1) from None
    return 0


async def _verify(bus: "Bus", folder: RunDir, version: int, trust: "Trust") -> int:
    from headrace.weights import report

    if version < 0:
        good, text = await report.verify_all(bus, folder.id, trust)
    else:
        good, text = await report.verify(bus, folder.id, version, trust=trust)
    if not good:
        for line in text.splitlines():
            complain(line)
        return 1
    say(text)
    return 0


async def _fold(bus: "Bus", folder: RunDir, count: int, section: Weights, trust: "Trust") -> None:
    from headrace.bus import credentials, keys
    from headrace.weights import fold, report

    try:
        signer = keys.load(bus.credentials, credentials.PUBLISHER)
    except ValueError as error:
        raise RunError(f"{error}: folding signs what it writes, so it runs where the sender does") from None
    commit = await report.commit_of(bus, folder.id, -1)
    record = await fold.publish(bus, bus, commit, count=count, name=section.codec, signer=signer, trust=trust)
    deltas = await fold.span(bus, commit, count, trust)
    before = sum(delta.wire_bytes for delta in deltas)
    say(
        f"versions {record.base_version} to {record.version}: {len(deltas)} deltas of {before} bytes folded into one "
        f"of {record.wire_bytes}"
    )


async def _export(bus: "Bus", folder: RunDir, version: int, path: str, trust: "Trust") -> None:
    from headrace.weights import chain, report

    commit = await report.commit_of(bus, folder.id, version)
    target = Path(path)
    if target.exists():
        raise RunError(f"{target} exists already: name another file")
    await chain.obtain(bus, commit, target, lambda version, state_hash: None, trust=trust)
    say(f"version {commit.version} of run {folder.id} in {target}, state {commit.state_hash}")


async def _diff(bus: "Bus", folder: RunDir, older: int, newer: int, trust: "Trust") -> None:
    from headrace.weights import chain, report
    from headrace.weights.snapshot import Snapshot

    with tempfile.TemporaryDirectory(prefix="headrace-diff-") as text:
        files: list[Path] = []
        for version in (older, newer):
            commit = await report.commit_of(bus, folder.id, version)
            files.append(Path(text) / f"{len(files)}.safetensors")
            await chain.obtain(bus, commit, files[-1], lambda version, state_hash: None, trust=trust)
        say(f"version {older} to version {newer} of run {folder.id}: " + report.diff(*map(Snapshot, files)))


async def _collect(bus: "Bus", folder: RunDir, chains: int, trust: "Trust") -> None:
    from headrace.bus.connection import Bus
    from headrace.weights import chain, collect

    pins = await collect.pinned(bus, folder.id)
    async with await Bus.connect(bus.link.url, role="trainer", credentials=bus.credentials) as trainer:
        gone = await collect.collect(
            bus,
            lambda subject: trainer.purge(chain.STREAM, subject=subject),
            folder.id,
            chains=chains,
            pins=pins,
            trust=trust,
        )
    if gone:
        say(f"{len(gone)} versions, {min(gone)} to {max(gone)}, and {sum(gone.values())} messages are gone")
    else:
        say(f"nothing to collect: the newest {chains} chains and what is pinned are all there is")
