"""`headrace export`: writes what a run made in another program's format.

A version as a Hugging Face folder with a model card, as a PEFT folder of its adapter, or as a safetensors file; the
attempts as ATIF 1.7 documents, as git patches in the form of SWE-bench's predictions, or, good ones alone, as data for
mid-training (rejection sampling); the figures to TensorBoard, Weights & Biases or MLflow while the run goes on.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.cli.arguments import add_elsewhere, add_plugins, add_run, add_set, integer
from headrace.cli.weights import add_version, with_chain
from headrace.launch.output import say
from headrace.launch.runs import RunError
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Task

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.cli.weights import Chain
    from headrace.config import Config
    from headrace.launch.runs import RunDir
    from headrace.messages.judging import Score
    from headrace.messages.weights import WeightHead
    from headrace.policy.config import PolicyConfig
    from headrace.tasks.exporting.atif import Decode


FORMATS = {
    "hugging-face": "a version as a Hugging Face folder",
    "adapter": "its adapter alone, as a PEFT folder",
    "safetensors": "a version as a safetensors file",
    "atif": "attempts as ATIF 1.7, one per line",
    "patches": "attempts as git patches, rows of SWE-bench's predictions",
    "data": "good attempts as data for mid-training",
    "metrics": "figures to the targets that [metrics] names, until the run ends; TARGET is a folder for its files",
}


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("export", help="write a run's weights, attempts or figures to other formats")
    add_run(parser, optional=False)
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder or file to write; must be new or empty")
    parser.add_argument(
        "--as",
        dest="format",
        choices=FORMATS,
        default="hugging-face",
        help="; ".join(f"{name}: {text}" for name, text in FORMATS.items()),
    )
    add_version(parser)
    parser.add_argument("--unsigned", action="store_true", help="accept versions without a signature")
    add_elsewhere(parser)
    parser.add_argument("--reward", type=float, default=1.0, metavar="R", help="data: smallest reward (default 1)")
    parser.add_argument(
        "--per-task", type=integer(1), default=4, metavar="N", help="data: most attempts of a task (default 4)"
    )
    add_set(parser)
    add_plugins(parser)
    parser.set_defaults(handler=export)


def export(args: argparse.Namespace) -> Awaitable[int]:
    """Write the target in the format of `--as`."""
    if args.format in ("hugging-face", "adapter"):
        return with_chain(hugging_face_folder, args)
    if args.format == "safetensors":
        return with_chain(safetensors, args)
    return {"atif": atif, "patches": patches, "data": data, "metrics": metrics}[args.format](args)


async def hugging_face_folder(chain: "Chain", args: argparse.Namespace) -> int:
    """Rebuild the version from the stream, verify it, and write the folder."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.config import Config, load
    from headrace.launch.admission import own
    from headrace.policy.adapters import peft
    from headrace.policy.layout.export import Export
    from headrace.policy.layout.export import export as write
    from headrace.rendering.registry import Renderers
    from headrace.weights import chain as chains
    from headrace.weights import report, tensor_state
    from headrace.weights.publishing import precision

    folder, target = chain.folder, args.target
    config = own(args.config) if args.config else load(folder.config) if folder.config.is_file() else Config()
    bundle = await renderer_bundles.fetch(chain.bus, folder.id)
    if bundle is None:
        raise RunError(f"run {folder.id} has no renderer bundle in HR_RENDERER: its trainer never started", 1)
    head = await report.commit_of(chain.bus, folder.id, args.version)
    place = folder.path if folder.path.is_dir() else None  # actors on other hosts leave no folder here
    with tempfile.TemporaryDirectory(prefix="export-", dir=place) as temporary:
        weights = Path(temporary) / "weights"
        await chains.obtain(
            chain.bus, head, weights, lambda version, state_hash: None, trust=chain.trust, fetch=chain.snapshots.fetch
        )
        shape, tensors = shape_of(folder, config), precision.restore(tensor_state.read(weights))
        text = card(folder, config, head)
        if args.format == "adapter":
            size = peft.export(shape, tensors, base_of(config), text, target)
            say(f"adapter of version {head.version} of run {folder.id} in {target}: {size:,} bytes")
            return 0
        stops = Renderers(bundle).for_conversations().stop_ids
        parts = Export(
            config=shape, tensors=tensors, bundle=bundle, card=text, stops=stops, source=config.policy.checkpoint
        )
        shape = write(parts, target)
    say(f"version {head.version} of run {folder.id} in {target}: {shape.dtype}, state {head.state_hash}")
    return 0


def shape_of(folder: "RunDir", config: "Config") -> "PolicyConfig":
    """The policy's shape. RunError when this machine has no description of it, CheckpointError."""
    from headrace.policy.layout import hugging_face

    trained = folder.path / "checkpoints" / "policy"
    if trained.is_dir():
        return hugging_face.read(trained)
    if not config.policy.checkpoint:
        raise RunError(f"there is no {trained}: copy it from the host of the trainer")
    return hugging_face.of_run(config)


def base_of(config: "Config") -> str:
    """The checkpoint that an adapter belongs on. RunError when the run began without one."""
    if not config.policy.checkpoint:
        raise RunError(
            "--as adapter: the run began with weights of no other checkpoint; export it without --as adapter", 2
        )
    return config.policy.checkpoint


def card(folder: "RunDir", config: "Config", head: "WeightHead") -> str:
    """The model card: the origin of the weights, and the run's figures if the run has a report."""
    file = folder.path / "report.json"
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    base = config.policy.checkpoint
    start = f"the checkpoint `{Path(base).name}`" if base else "a policy that headrace initialised"
    rows = [
        ("run", f"{folder.id}, seed {config.run.seed}"),
        ("version", str(head.version)),
        ("state hash", head.state_hash),
        ("started from", start),
        ("mid-training tokens", f"{config.mid_training.tokens:,}"),
    ]
    figures = [
        ("steps of reinforcement learning, whole run", "steps"),
        ("episodes, whole run", "episodes"),
        ("held-out tasks", "heldout_tasks"),
        ("held-out, temperature 1, before", "heldout_before"),
        ("held-out, temperature 1, last version", "heldout_after_t1"),
        ("held-out, greedy, last version", "heldout_after_greedy"),
        ("sandbox backend", "backend"),
        ("largest difference of a log-probability, sampler against trainer", "max_abs_dlp"),
    ]
    rows += [(name, str(report[key])) for name, key in figures if report.get(key) is not None]
    unseen = report.get("unseen_templates") or {}
    rows += [
        (f"unseen templates, temperature 1, {name}", str(unseen[key]))
        for name, key in (("before", "before"), ("last version", "after_t1"))
        if unseen.get(key) is not None
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    finished = "" if report else "\nThe run has no report yet: figures of its evaluations are missing here.\n"
    return (
        "---\ntags:\n- headrace\n- reinforcement-learning\n---\n"
        f"# {folder.id}, version {head.version}\n\n"
        "A coding agent's policy, trained with headrace by reinforcement learning on tasks in sandboxes.\n\n"
        f"| | |\n|---|---|\n{table}\n{finished}"
    )


async def safetensors(chain: "Chain", args: argparse.Namespace) -> int:
    """Rebuild the version from the stream and write it."""
    from headrace.weights import chain as chains
    from headrace.weights import report

    head = await report.commit_of(chain.bus, chain.folder.id, args.version)
    target = args.target
    if target.exists():
        raise RunError(f"{target} exists already: name another file")
    await chains.obtain(
        chain.bus, head, target, lambda version, state_hash: None, trust=chain.trust, fetch=chain.snapshots.fetch
    )
    say(f"version {head.version} of run {chain.folder.id} in {target}, state {head.state_hash}")
    return 0


async def atif(args: argparse.Namespace) -> int:
    """Write the trajectories as ATIF 1.7 documents, one per line; 1 if none is stored."""
    from headrace import __version__
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.tasks.exporting.atif import trajectory

    folder = runs.find(args.run)
    async with bus_of(folder, "replay") as bus:
        decode, scores = await _decoder(bus, folder.id), await _scores(bus, folder.id)

        def row(of: StoredAttempt) -> object:
            return trajectory(of.made, of.task, decode, scores.get(of.seq), __version__, of.policy)

        return await _write(bus, folder, args.target, row, "trajectories")


async def _write(
    bus: "Bus", folder: "RunDir", target: Path, row: Callable[["StoredAttempt"], object], kind: str
) -> int:
    """Write the row of every attempt as a line of JSON; 1 if no attempt is stored. RunError."""
    from headrace.config import load

    count = 0
    with target.open("w", encoding="utf-8") as file:
        async for attempt in attempts(bus, folder.id, load(folder.config).tasks.dir):
            file.write(json.dumps(row(attempt)) + "\n")
            count += 1
    say(f"{count} {kind} in {target}")
    return 0 if count else 1


async def _decoder(bus: "Bus", run: str) -> "Decode":
    """The run's tokenizer; in a run with only scripted policies, a tokenizer of tags and single bytes."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.rendering.schemas import tags
    from headrace.rendering.tokenizer import Tokenizer

    bundle = await renderer_bundles.fetch(bus, run)
    tokenizer = Tokenizer.train((), 256 + len(tags())) if bundle is None else Tokenizer.parse(bundle.tokenizer_json)
    return tokenizer.decode


async def _scores(bus: "Bus", run: str) -> "dict[int, Score]":
    """The scores of a run by the sequence of their trajectory."""
    from headrace.messages.judging import Score
    from headrace.messages.subjects import SCORE

    scores: dict[int, Score] = {}
    async for received in bus.history("HR_SCORE", SCORE.where(run=run)):
        if isinstance(score := received.message, Score):
            scores[score.trajectory_seq] = score
    return scores


async def patches(args: argparse.Namespace) -> int:
    """Write the changes of the attempts as git patches, a row each; 1 if no trajectory is stored."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.tasks.exporting.patches import patch

    def row(of: StoredAttempt) -> object:
        name = of.made.task.task
        try:
            text, left_out = patch(of.task, of.made)
        except ValueError as error:
            raise RunError(f"{name}: {error}") from None
        return {
            "instance_id": name,
            "model_name_or_path": of.policy,
            "model_patch": text.decode("utf-8", "surrogateescape"),
            "attempt": of.made.id,
            "left_out": left_out,
        }

    folder = runs.find(args.run)
    async with bus_of(folder, "judge") as bus:
        return await _write(bus, folder, args.target, row, "patches")


class StoredAttempt(NamedTuple):
    """A stored trajectory."""

    seq: int
    """Its sequence in HR_TRAJ."""
    made: Trajectory
    task: Task

    @property
    def policy(self) -> str:
        """Kind of the policy, and its name or version."""
        policy = self.made.policy
        return f"{policy.kind}:{policy.name or policy.version}"


async def attempts(bus: "Bus", run: str, suites: str) -> AsyncIterator[StoredAttempt]:
    """All attempts of a run in the order of the stream, without users' sessions. suites: folder of the suites that
    have one. UnknownSuite."""
    from headrace.messages.subjects import TRAJ
    from headrace.tasks import open_suite

    suite = cache(partial(open_suite, root=suites))
    async for received in bus.history("HR_TRAJ", TRAJ.where(run=run)):
        made = received.message
        if isinstance(made, Trajectory) and made.lane != "production":
            yield StoredAttempt(received.seq, made, suite(made.task.suite).task(made.task.task))


async def data(args: argparse.Namespace) -> int:
    """Write the file under a temporary name, and rename it when it is complete."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.launch.session import run_of

    target = args.target
    if target.exists():
        raise RunError(f"{target} exists: expected a new file", 2)
    part = target.with_name(f".{target.name}.part")
    async with run_of(args.run, role="replay") as run:
        bundle = await renderer_bundles.fetch(run.bus, run.id)
        if bundle is None:
            raise RunError(f"run {run.id} has no renderer bundle in HR_RENDERER: its trainer never started", 1)
        count, written = 0, 0
        try:
            with part.open("wb") as file:
                async for lines in good_attempts(run.bus, run.id, bundle.tokenizer_json, args):
                    file.write(b"".join(lines))
                    count, written = count + 1, written + len(lines)
        except OSError as error:
            raise RunError(f"{target} cannot be written: {error.strerror}", 1) from None
    if not count:
        part.unlink()
        raise RunError(f"run {run.id} has no attempt with a reward of at least {args.reward:g}: lower --reward", 1)
    os.replace(part, target)
    say(f"{target}: {count} attempts of run {run.id}, {written} segments")
    return 0


async def good_attempts(
    bus: "Bus", run: str, tokenizer_json: str, args: argparse.Namespace
) -> AsyncIterator[list[bytes]]:
    """The lines of each wanted attempt in the order of the closed groups; purged records are left out."""
    from headrace.replay.fetching import fetch
    from headrace.replay.rejudge import closings
    from headrace.training.data.trajectories import segments, tokenizer_hash

    tokenizer, taken = tokenizer_hash(tokenizer_json), Counter[tuple[str, str]]()
    for group in await closings(bus, run):
        trajectories, scores = await fetch(bus, [group])
        for trajectory_seq, score_seq in group.slots:
            trajectory, score = trajectories.get(trajectory_seq), scores.get(score_seq)
            if trajectory is None or score is None or score.reward < args.reward:
                continue
            task = (trajectory.task.suite, trajectory.task.task)
            if taken[task] < args.per_task:
                taken[task] += 1
                yield [msgspec.json.encode(part) + b"\n" for part in segments(trajectory, score.reward, tokenizer)]


async def metrics(args: argparse.Namespace) -> int:
    """Follow the run to its end."""
    from headrace.config import ConfigError, load
    from headrace.dashboard.exporters.follow import follow
    from headrace.dashboard.exporters.writers import open_writer, wanted
    from headrace.launch import runs
    from headrace.launch.session import run_of

    run_folder = runs.find(args.run)
    targets = wanted(load(run_folder.config, args.set).metrics)
    if not targets:
        raise ConfigError("[metrics] names no target: set tensorboard, wandb or mlflow")
    folder = args.target
    folder.mkdir(parents=True, exist_ok=True)

    async with run_of(str(run_folder.path), role="dashboard") as run:
        writers = {name: open_writer(name, target, run.id, folder) for name, target in targets.items()}
        try:
            await follow(run.bus, run.id, writers, folder / "position.json")
        finally:
            for writer in writers.values():
                writer.close()
    return 0
