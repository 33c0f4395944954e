"""A bundle: a folder with one step, which can be replayed without a broker and without the run.

Layout:
    README                    the command that replays the step
    bundle.json               run and step, and the sha256 of every other file
    config.json tokenizer.json policy/    the inputs of the run's trainer
    checkpoint.safetensors    the trainer's state before the step
    manifest.step_manifest    and outcome.step_done or outcome.step_failed
    trajectories/ scores/     <sequence>.trajectory and .score

Messages are written with the codec of the bus (msgpack, lz4 where it pays). bundle.json is written last, so an
incomplete or changed bundle is detected.

Trade-off: the bundle has a checkpoint at the step itself, not the run's nearest one, so it needs the records of one
step only. To make it, the steps since the run's nearest checkpoint are replayed, and their bits are compared.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.config import ConfigError, load
from headrace.inner_paths import is_inner
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode_as, encode
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.replay.fetching import Records
from headrace.replay.recorded_run import RecordedRun, ReplayError
from headrace.replay.step import Loaded

INDEX = "bundle.json"
FORMAT = 1
T = TypeVar("T", bound=Message)
_LZ4_MAGIC = b"\x04\x22\x4d\x18"


class BundleIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`bundle.json`."""

    format: int
    run: str
    step: int
    reason: str
    """Why the step failed; empty for a step that succeeded."""
    files: dict[str, str]
    """sha256 of each file by its path in the folder."""


def is_bundle(folder: Path) -> bool:
    """Whether a folder has a bundle.json."""
    return (folder / INDEX).is_file()


def write(recorded: RecordedRun, loaded: Loaded, folder: Path) -> Path:
    """Write a bundle of a loaded step. ReplayError if the folder is not empty; OSError if the disk is full."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReplayError(f"{folder} exists already: name a new folder")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "policy").mkdir(parents=True)
    for name in ("trajectories", "scores"):
        (part / name).mkdir()
    loaded.trainer.save({})
    os.link(loaded.trainer.folder / "checkpoint.safetensors", part / "checkpoint.safetensors")
    for file in loaded.trainer.policy_folder.iterdir():
        shutil.copyfile(file, part / "policy" / file.name)
    (part / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(recorded.config)))
    (part / "tokenizer.json").write_text(recorded.tokenizer, encoding="utf-8")
    records: dict[str, Message] = {"manifest": loaded.manifest, "outcome": loaded.recorded}
    records |= {f"trajectories/{seq}": record for seq, record in loaded.trajectories.items()}
    records |= {f"scores/{seq}": record for seq, record in loaded.scores.items()}
    for name, record in records.items():
        (part / f"{name}.{record.type_name}").write_bytes(encode(record)[0])
    step, run = loaded.manifest.step, recorded.run
    (part / "README").write_text(f"Step {step} of run {run}. To replay it: headrace replay {folder.name}\n")
    index = BundleIndex(
        format=FORMAT,
        run=run,
        step=step,
        reason=loaded.recorded.reason if isinstance(loaded.recorded, StepFailed) else "",
        files={name: _sha256(part / name) for name in _files(part)},
    )
    (part / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    if folder.is_dir():
        folder.rmdir()
    os.replace(part, folder)
    return folder


def read(folder: Path) -> RecordedRun:
    """The recorded run of one step. ReplayError when the bundle is damaged, incomplete, or of a later headrace."""
    index = _index(folder)
    for name, expected in index.files.items():
        if not is_inner(name):
            raise ReplayError(f"the bundle {folder} is damaged, its {INDEX} names {name!a:.80}")
        file = folder / name
        if not file.is_file():
            raise ReplayError(f"the bundle {folder} is incomplete, it lacks {name}: copy or write it again")
        if _sha256(file) != expected:
            raise ReplayError(f"the bundle {folder} is damaged, {name} is not what was written: copy or write it again")
    try:
        config = load(folder / "config.json")
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        manifest = _message(folder / "manifest.step_manifest", StepManifest)
        failed = folder / "outcome.step_failed"
        outcome: StepDone | StepFailed
        if failed.is_file():
            outcome = _message(failed, StepFailed)
        else:
            outcome = _message(folder / "outcome.step_done", StepDone)
        records = _records(folder, index.files)
    except (OSError, msgspec.DecodeError, UnreadableMessage, ValueError, ConfigError) as error:
        raise ReplayError(f"the bundle {folder} cannot be read by this headrace: {error}") from None
    if config.policy.checkpoint:  # the recorded path is one on the run's machine
        policy = msgspec.structs.replace(config.policy, checkpoint=str(folder / "policy"))
        config = msgspec.structs.replace(config, policy=policy)

    async def fetch(_: StepManifest) -> Records:
        return records

    return RecordedRun(
        run=index.run,
        config=config,
        tokenizer=tokenizer,
        manifests={index.step: manifest},
        outcomes={index.step: outcome},
        checkpoints={index.step: folder / "checkpoint.safetensors"},
        fetch=fetch,
    )


def _index(folder: Path) -> BundleIndex:
    try:
        raw: dict[str, Any] = msgspec.json.decode((folder / INDEX).read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise ReplayError(f"the bundle {folder} has format {raw['format']}, this headrace reads {FORMAT}")
        return msgspec.convert(raw, BundleIndex)
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"the bundle {folder} is damaged, its {INDEX} cannot be read: {error}") from None


def _records(folder: Path, names: Iterable[str]) -> Records:
    trajectories = {_seq(n): _message(folder / n, Trajectory) for n in names if n.startswith("trajectories/")}
    return trajectories, {_seq(n): _message(folder / n, Score) for n in names if n.startswith("scores/")}


def _seq(name: str) -> int:
    return int(Path(name).stem)


def _message(file: Path, kind: type[T]) -> T:
    payload = file.read_bytes()
    packed: Mapping[str, str] = {"Hr-Encoding": "lz4"} if payload.startswith(_LZ4_MAGIC) else {}
    return decode_as(kind, payload, packed)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
