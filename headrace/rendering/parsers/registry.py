"""Every wire syntax by its name in ``[policy] renderer``."""

from headrace.rendering.parsers.base import Syntax
from headrace.rendering.parsers.deepseek import DeepSeek, Dsml
from headrace.rendering.parsers.glm import Glm
from headrace.rendering.parsers.harmony import Harmony
from headrace.rendering.parsers.hermes import Hermes
from headrace.rendering.parsers.kimi_k2 import KimiK2
from headrace.rendering.parsers.llama3 import Llama3
from headrace.rendering.parsers.minimax import MiniMax
from headrace.rendering.parsers.mistral import Mistral
from headrace.rendering.parsers.pythonic import Pythonic
from headrace.rendering.parsers.qwen_xml import QwenXml

SYNTAXES: dict[str, Syntax] = {
    syntax.name: syntax
    for syntax in (
        Hermes(),
        QwenXml(),
        Glm(),
        KimiK2(),
        DeepSeek(),
        Dsml(),
        Harmony(),
        Mistral(),
        MiniMax(),
        Llama3(),
        Pythonic(),
    )
}
"""Syntaxes with a marker of their own come before those that a whole turn has to match."""
