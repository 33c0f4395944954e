import json
from pathlib import Path

from headrace.messages.rollout import RendererBundle
from headrace.rendering.tokenizer import Tokenizer
from headrace.training.data.base import Document, Lines


class Pairs(Lines):
    """JSON of a question and an answer; the answer is learned."""

    suffixes = (".pairs",)

    def __init__(self, bundle: RendererBundle) -> None:
        self._tokenizer = Tokenizer.parse(bundle.tokenizer_json)

    def encode(self, record: bytes, path: Path) -> Document:
        question, answer = (self._tokenizer.encode(json.loads(record)[name]) for name in ("question", "answer"))
        return Document(ids=question + answer, weights=[0.0] * len(question) + [1.0] * len(answer))
