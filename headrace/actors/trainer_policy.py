"""The run's tokenizer and what a new policy reads before reinforcement."""

import os
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config
from headrace.harness.rehearse import answer
from headrace.policy.renderer import Format, Renderer
from headrace.policy.tokenizer import Tokenizer
from headrace.tasks import traces
from headrace.training.mid_training import Trace

TOKENIZER_TRACES = 400
"""Traces on which a tokenizer is made: a second of work, and every word of the tools is in there."""


def tokenizer(config: Config, folder: Path) -> str:
    """Text of the run's tokenizer.json: made or copied once, then read. Rollouts read it from the run's folder."""
    file = folder / "tokenizer.json"
    if file.exists():
        return file.read_text(encoding="utf-8")
    if config.policy.checkpoint:
        text = (Path(config.policy.checkpoint) / "tokenizer.json").read_text(encoding="utf-8")
    else:
        texts = traces.tokenizer_texts(config.run.seed, TOKENIZER_TRACES, Format(), answer)
        text = Tokenizer.train(texts, config.policy.vocab).dump()
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_name(".tokenizer.json.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
    return text


def mid_training(config: Config, tokenizer_json: str) -> Iterator[Trace]:
    """Traces of tool use without an end, in the policy's own format."""
    form = Renderer(Tokenizer.parse(tokenizer_json))
    return traces.mid_training_texts(config.run.seed, config.mid_training.quality, form, answer)
