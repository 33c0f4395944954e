"""The run's renderer bundle, and the data for the mid-training of a new policy."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.config.training import Data
from headrace.harness.sync_tools import answer
from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import RendererBundle
from headrace.registry import merged
from headrace.rendering.base import RendererError
from headrace.rendering.bundle import checkpoint_bundle, terse_bundle
from headrace.rendering.registry import Renderers
from headrace.rendering.terse import Format
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import note_traces, notes, repositories, traces
from headrace.training.batches.micro_batch import device_of
from headrace.training.data import opening
from headrace.training.data import registry as readers
from headrace.training.data.base import DataError
from headrace.training.data.mixture import Mixture
from headrace.training.device import TrainerError
from headrace.training.figures.peaks import why_unknown
from headrace.training.mid_training import Progress
from headrace.training.trainer import PolicyTrainer, plugins_of

TOKENIZER_TRACES = 400
"""Number of traces from which a tokenizer is trained: this takes a second, and they contain all words of the tools."""
HELD_OUT = "mid-training.jsonl"
"""Losses on held-out documents, in the run's folder."""
BUNDLE = "renderer.json"
"""The bundle's file in the run's folder: a resumed run renders as before, even if the checkpoint's files changed."""


def bundle(config: Config, folder: Path) -> RendererBundle:
    """The run's bundle, built once and then read from its file. tokenizer.json is written too, for replay and engines.

    RendererError when the checkpoint's format cannot be used.
    """
    file = folder / BUNDLE
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=RendererBundle)
    made = _make(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", made.tokenizer_json.encode())
    _write(file, msgspec.json.encode(made))
    return made


def _make(config: Config, folder: Path) -> RendererBundle:
    policy, tools = config.policy, schemas_of(tuple(name for name in TOOLS.names() if TOOLS.builtin(name)))
    if not policy.checkpoint and policy.renderer not in ("auto", "terse"):
        raise RendererError(f"[policy] renderer = {policy.renderer!r} needs a checkpoint; expected auto or terse")
    if policy.checkpoint:
        return checkpoint_bundle(
            Path(policy.checkpoint),
            policy.renderer,
            policy.chat_template,
            policy.template_kwargs,
            tools=tools,
            system=policy.system,
        )
    return terse_bundle(_tokenizer(config).dump(), tools)


def _tokenizer(config: Config) -> Tokenizer:
    """Trained on the traces of mid-training."""
    seed, vocab = config.run.seed, config.policy.vocab
    made = note_traces if config.mid_training.traces == "notes" else traces
    return Tokenizer.train(made.tokenizer_texts(seed, TOKENIZER_TRACES, Format(), answer), vocab)


def _write(file: Path, content: bytes) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(content)
    os.replace(part, file)


def mid_training(
    config: Config, made: RendererBundle, between: Callable[[], None] = lambda: None
) -> Iterable[traces.Trace] | Mixture:
    """The data of mid-training: the sources of `[[mid_training.data]]`, or generated traces alone.

    between: called before each document; what it raises ends the iteration. DataError for data that is not right.
    """
    begin = partial(generated, config, made)
    return opening.mixture(config, made, begin, between) if config.mid_training.data else _checked(begin(), between)


def plugins_used(config: Config) -> tuple[Plugin, ...]:
    """The plugins of a run's steps, and the readers of its mid-training. TrainerError for a name that no registry
    has."""
    try:
        return merged(plugins_of(config.algorithm), readers.plugins_of(_data(config)))
    except DataError as error:
        raise TrainerError(str(error)) from None


def _data(config: Config) -> tuple[Data, ...]:
    """The sources of a run that trains on them."""
    return config.mid_training.data if config.mid_training.tokens else ()


def check_data(config: Config) -> None:
    """Check all data of mid-training before anything is started. DataError, RendererError."""
    if _data(config):
        with tempfile.TemporaryDirectory(prefix="headrace-data-") as folder:
            mid_training(config, bundle(config, Path(folder)))


def _checked(made: Iterator[traces.Trace], between: Callable[[], None]) -> Iterator[traces.Trace]:
    for trace in made:
        between()
        yield trace


def generated(config: Config, made: RendererBundle) -> Iterator[traces.Trace]:
    """An endless iterator of traces of tool use in the policy's own format."""
    recipe, seed = config.mid_training, config.run.seed
    tools = notes.TOOLS if recipe.traces == "notes" else repositories.TOOLS
    renderer = Renderers(made).open(schemas_of(tools))
    answers = partial(answer, details=renderer.detailed_results)
    if recipe.traces == "notes":
        return note_traces.mid_training_texts(seed, recipe.quality, renderer, answers, recipe.context_weight)
    return traces.mid_training_texts(
        seed,
        recipe.quality,
        renderer,
        answers,
        recipe.context_weight,
        multi_line=recipe.multi_line,
        broad=recipe.broad,
        retries=recipe.retries,
    )


class HeldOut(msgspec.Struct, frozen=True):
    """One line of HELD_OUT."""

    step: int
    held_out: dict[str, float]


def held_out(folder: Path) -> dict[str, dict[str, float]]:
    """The recorded losses by source: `before` where they were measured before the first step, and `after`."""
    try:
        lines = (folder / HELD_OUT).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    entries = [msgspec.json.decode(line, type=HeldOut) for line in lines]
    losses: dict[str, dict[str, float]] = {}
    for entry in entries:
        for source, loss in entry.held_out.items():
            losses.setdefault(source, {})["after" if entry.step else "before"] = loss
    return {source: loss for source, loss in losses.items() if "after" in loss}


async def tell(actor: Actor, folder: Path, trainer: PolicyTrainer) -> None:
    """Publish what became known while the policy was prepared: the losses on held-out documents, an unknown peak."""
    for source, losses in held_out(folder).items():
        told = ", ".join(f"{name} mid-training {loss:.4f}" for name, loss in losses.items())
        await actor.event("held_out_loss", f"{source}: {told} nats", "info", source=source, **losses)
    model = trainer.state.model
    if why := why_unknown(actor.config, model.config, device_of(model)):
        await actor.event("peak_unknown", why)


def record(folder: Path, progress: Progress) -> None:
    """Append the losses on held-out documents to the run's file HELD_OUT."""
    line = {"step": progress.step, "tokens": progress.tokens, "loss": progress.loss, "held_out": progress.held_out}
    with (folder / HELD_OUT).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def figures(progress: Progress, held_out: float | None) -> dict[str, float]:
    """The metrics of mid-training. held_out: the newest loss on held-out documents."""
    told = {"mid_training_tokens": float(progress.tokens)}
    if progress.step:
        told["mid_training_loss"] = progress.loss
    return told if held_out is None else told | {"mid_training_held_out_loss": held_out}
