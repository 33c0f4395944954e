"""Opens the sources of `[[mid_training.data]]`: checks all files, and makes the mixture."""

from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.config import Config
from headrace.config.training import Data
from headrace.messages.rollout import RendererBundle
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from headrace.training.data.base import DataError, Reader
from headrace.training.data.chat import ChatReader
from headrace.training.data.index import Index
from headrace.training.data.mixture import Encoded, Files, Generated, Mixture, Source
from headrace.training.data.registry import open_reader
from headrace.training.data.text import TextReader
from headrace.training.data.trajectories import TrajectoryReader


def open_chat(bundle: RendererBundle) -> Reader:
    """Conversations, rendered as episodes are. DataError for a policy without a chat template."""
    renderer = Renderers(bundle).for_conversations()
    if not isinstance(renderer, NativeRenderer):
        raise DataError(
            "[[mid_training.data]] kind = 'chat': expected a policy with a chat template, got the format "
            f"{bundle.renderer!r}; set [policy] checkpoint"
        )
    return ChatReader(renderer)


def open_text(bundle: RendererBundle) -> Reader:
    """Plain text and code."""
    tokenizer = Tokenizer.parse(bundle.tokenizer_json)
    ends = ("<|endoftext|>", "<|end_of_text|>", bundle.special_tokens.get("eos_token", ""))
    return TextReader(tokenizer, next((id for end in ends if (id := tokenizer.tag(end)) is not None), None))


def open_trajectories(bundle: RendererBundle) -> Reader:
    """Recorded ids of the same tokenizer."""
    return TrajectoryReader(bundle.tokenizer_json, len(Tokenizer.parse(bundle.tokenizer_json)))


def mixture(
    config: Config,
    bundle: RendererBundle,
    generated: Callable[[], Iterator[Encoded]],
    between: Callable[[], None] = lambda: None,
) -> Mixture:
    """Check and open every source. generated: begins the generated traces. DataError for the first fault."""
    recipe = config.mid_training
    sources = [
        _open(number, entry, bundle, recipe.held_out, config.run.seed, generated)
        for number, entry in enumerate(recipe.data)
    ]
    return Mixture(sources, recipe, between)


def _open(
    number: int,
    entry: Data,
    bundle: RendererBundle,
    held_out: float,
    seed: int,
    generated: Callable[[], Iterator[Encoded]],
) -> Source:
    name = f"{number}:{entry.kind}"
    if entry.kind == "generated":
        return Generated(name, generated, weight=entry.weight)
    reader, source = open_reader(entry.kind, bundle)
    index = Index(Path(entry.path), reader, held_out, source)
    return Files(name, index, weight=entry.weight, epochs=entry.epochs, splits=reader.splits, seed=seed)
