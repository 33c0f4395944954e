from collections.abc import Sequence

from headrace.messages.rollout import RendererBundle
from headrace.rendering.base import Renderer
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer


def build(bundle: RendererBundle, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> Renderer:
    """The terse format with just the tools of the task."""
    return TerseRenderer(tokenizer, tools, bundle.sha256)
