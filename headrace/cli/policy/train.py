"""`headrace policy train`: mid-train a policy on data, without a run, and write it as a Hugging Face folder."""

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.training.mid_training import Progress


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("train", help="mid-train a policy on data and write a Hugging Face folder")
    parser.add_argument("config", metavar="TOML", help="configuration; [policy], [mid_training] and [trainer] count")
    parser.add_argument("dir", metavar="DIR", help="folder to write; an interrupted command resumes from DIR.training")
    add_set(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Train, print progress, and write the folder."""
    from headrace.launch.admission import own
    from headrace.policy.config import CheckpointError
    from headrace.rendering.base import RendererError
    from headrace.training.checkpoint import UnusableCheckpoint
    from headrace.training.data.base import DataError
    from headrace.training.device import TrainerError
    from headrace.training.mid_training import MidTrainingFailed
    from headrace.training.parallel.interface import GroupError

    config, target = own(args.config, args.set), Path(args.dir)
    if target.exists():
        raise RunError(f"{target} exists: expected a new folder", 2)
    if not config.mid_training.tokens:
        raise RunError("[mid_training] tokens: expected at least 1, got 0", 2)
    try:
        train(config, target)
    except (DataError, RendererError, CheckpointError, UnusableCheckpoint, TrainerError) as error:
        raise RunError(str(error), 2) from None
    except (GroupError, MidTrainingFailed) as error:
        raise RunError(str(error), 1) from None
    return 0


def train(config: "Config", target: Path) -> None:
    """Train in `target`.training, which a later call continues, and move the result to `target`."""
    from headrace.actors.trainer import initial_policy
    from headrace.policy.layout import hugging_face
    from headrace.policy.layout.export import Export, export
    from headrace.training import opening
    from headrace.weights import tensor_state

    folder = target.with_name(f"{target.name}.training")
    folder.mkdir(parents=True, exist_ok=True)
    bundle = initial_policy.bundle(config, folder)
    data = initial_policy.mid_training(config, bundle)

    def progress(done: "Progress") -> None:
        held_out = "".join(f", {name} {loss:.4f}" for name, loss in done.held_out.items())
        held_out = f"; held out{held_out[1:]}" if held_out else ""
        loss = f", loss {done.loss:.4f}" if done.step else ""
        say(f"step {done.step}: {done.tokens:,} of {done.of_tokens:,} tokens{loss}{held_out}")
        if done.held_out:
            initial_policy.record(folder, done)

    trainer = opening.prepare(
        config, folder / "checkpoints", tokenizer_json=bundle.tokenizer_json, traces=lambda: data, progress=progress
    )
    try:
        shape, digest = hugging_face.read(trainer.policy_folder), trainer.state.hash()
        made = folder / "export"
        shutil.rmtree(made, ignore_errors=True)
        if config.trainer.ranks == 1:
            tensors = trainer.state.published()
        else:  # no process has whole tensors
            tensors = tensor_state.read(trainer.publish(folder).durable.result())
        parts = Export(config=shape, tensors=tensors, bundle=bundle, card=card(config, digest))
        export(parts, made)
    finally:
        trainer.close()
    if (folder / initial_policy.HELD_OUT).exists():
        shutil.copyfile(folder / initial_policy.HELD_OUT, made / initial_policy.HELD_OUT)
    os.replace(made, target)
    shutil.rmtree(folder)
    say(f"{target}: {shape.dtype}, state {digest}")


def card(config: "Config", digest: str) -> str:
    """The model card: the origin of the weights."""
    sources = [
        f"| {source.kind} | `{Path(source.path).name}` | {source.weight:g} |" for source in config.mid_training.data
    ]
    rows = "\n".join(sources or ["| generated | | 1 |"])
    base = f"the checkpoint `{Path(config.policy.checkpoint).name}`" if config.policy.checkpoint else "random weights"
    return (
        f"---\ntags:\n- headrace\n---\n# A mid-trained policy\n\nStarted from {base}; at most "
        f"{config.mid_training.tokens:,} tokens; seed {config.run.seed}; state {digest}.\n\n"
        f"| data | path | weight |\n|---|---|---|\n{rows}\n"
    )
