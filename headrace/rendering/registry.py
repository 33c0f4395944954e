"""Renderers by name, built-in ones and those from outside, and the renderers of a bundle.

A renderer from outside is a function ``build(bundle, tokenizer, tools) -> Renderer``, named by an entry point of the
group ``headrace.renderers`` or as ``module:attribute`` in ``[policy] renderer``.
"""

from collections.abc import Callable, Sequence

import msgspec

from headrace.messages.rollout import RendererBundle
from headrace.registry import Registry
from headrace.rendering import schemas
from headrace.rendering.base import Renderer, RendererError
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.tokenizer import Tokenizer

SYSTEM = """You are a coding agent in a repository. Use the tools to find the cause of the problem, change as little \
as possible, run the tests, then call finish."""
"""The system message of a run whose configuration has none."""
OPENED = 64
"""Renderers that are kept: one per set of tools."""
Builder = Callable[[RendererBundle, Tokenizer, Sequence[ToolSchema]], Renderer]

RENDERERS: Registry[Builder] = Registry(
    "renderers",
    {"terse": "headrace.rendering.terse:build"} | dict.fromkeys(SYNTAXES, "headrace.rendering.native.opening:build"),
)


def source_hash(name: str) -> str:
    """Source hash of a renderer from outside; empty for a built-in. PluginError when there is none of that name."""
    plugin = RENDERERS.plugin(name)
    return plugin.source if plugin is not None else ""


class Renderers:
    """The renderers of one bundle: one per set of tools, over one tokenizer."""

    def __init__(self, bundle: RendererBundle) -> None:
        """RendererError when this node's renderer is not that of the bundle."""
        if bundle.plugin != source_hash(bundle.renderer):
            raise RendererError(
                f"this node's source of the renderer {bundle.renderer!r} differs from the run's: "
                f"install the run's version"
            )
        self.bundle = bundle
        self._build = RENDERERS.get(bundle.renderer)
        self._tokenizer = Tokenizer.parse(bundle.tokenizer_json)
        self._opened: dict[tuple[ToolSchema, ...], Renderer] = {}
        self._agreed: set[tuple[ToolSchema, ...]] = set()

    def opened(self, tools: Sequence[ToolSchema]) -> Renderer | None:
        """The renderer of an earlier `open` of these tools; None before there was one."""
        return self._open(tuple(tools)) if tuple(tools) in self._agreed else None

    def open(self, tools: Sequence[ToolSchema]) -> Renderer:
        """The renderer for a task that offers these tools. RendererError when a tool differs from the run's."""
        shown = schemas.terse(tools) if self.bundle.renderer == "terse" else tools
        for name, schema in schemas.functions_json(shown).items():
            if self.bundle.tools.get(name, schema) != schema:  # only this node may have a plugin's tool
                raise RendererError(f"this node's tool {name} differs from the run's: install the run's version")
        renderer = self._open(tuple(tools))
        self._agreed.add(tuple(tools))
        return renderer

    def for_conversations(self) -> Renderer:
        """The renderer for conversations that bring their own tools, such as a client's or those of a chat file. The
        tools that it is opened with only check the template, so they are not compared with the run's."""
        return self._open(schemas.TABLE)

    def _open(self, key: tuple[ToolSchema, ...]) -> Renderer:
        if key not in self._opened:
            while len(self._opened) >= OPENED:
                del self._opened[next(iter(self._opened))]
            if key or self.bundle.system != SYSTEM:
                self._opened[key] = self._build(self.bundle, self._tokenizer, key)
            else:  # SYSTEM explains tools, so it is left out; the bundle's hash stays the run's
                bare = self._build(msgspec.structs.replace(self.bundle, system=""), self._tokenizer, key)
                bare.bundle = self.bundle.sha256
                self._opened[key] = bare
        return self._opened[key]
