"""`headrace export`: writes a version of a run as a Hugging Face folder, with a model card."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_elsewhere
from headrace.cli.weights.session import add_version, declare
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain
    from headrace.config import Config
    from headrace.launch.runs import RunDir
    from headrace.messages.weights import WeightHead
    from headrace.policy.config import PolicyConfig


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "export", "write a version of a run as a Hugging Face folder", export)
    parser.add_argument("run", help="run id, path or 'latest'")
    parser.add_argument("dir", metavar="DIR", help="folder to write; must be new or empty")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, as a PEFT folder")
    add_version(parser)
    add_elsewhere(parser)
    parser.add_argument("--unsigned", action="store_true", help="accept versions without a signature")


async def export(chain: "Chain", args: argparse.Namespace) -> int:
    """Rebuild the version from the stream, verify it, and write the folder."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.config import Config, load
    from headrace.launch.admission import own
    from headrace.policy.adapters import peft
    from headrace.policy.config import CheckpointError
    from headrace.policy.layout.export import Export
    from headrace.policy.layout.export import export as write
    from headrace.weights import chain as chains
    from headrace.weights import report, tensor_state
    from headrace.weights.publishing import precision

    folder, target = chain.folder, Path(args.dir)
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
        try:
            # Weights in eight bits become bfloat16, which holds them exactly and every reader supports.
            shape, tensors = shape_of(folder, config), precision.restore(tensor_state.read(weights))
            text = card(folder, config, head)
            if args.adapter:
                size = peft.export(shape, tensors, base_of(config), text, target)
                say(f"adapter of version {head.version} of run {folder.id} in {target}: {size:,} bytes")
                return 0
            shape = write(Export(config=shape, tensors=tensors, bundle=bundle, card=text), target)
        except CheckpointError as error:
            raise RunError(str(error)) from None
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
        raise RunError("--adapter: the run began with weights of no other checkpoint; export it without --adapter", 2)
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
