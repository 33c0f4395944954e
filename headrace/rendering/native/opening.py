"""Opens the checked renderer of a bundle with a chat format, and detects the syntax of a template."""

from collections.abc import Sequence

import msgspec

from headrace.messages.rollout import RendererBundle
from headrace.rendering import schemas
from headrace.rendering.base import NoStopToken, RendererError
from headrace.rendering.native import checks
from headrace.rendering.native.conversation import Conversation
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.native.template import ChatTemplate, TemplateRefused
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.tokenizer import Tokenizer


def build(bundle: RendererBundle, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> NativeRenderer:
    """The renderer of a bundle whose format is a wire syntax. RendererError when a check of the template fails."""
    try:
        return _checked(bundle, tokenizer, tools)
    except RendererError as error:
        raise RendererError(f"[policy] renderer = {bundle.renderer!r} does not fit this checkpoint: {error}") from None


def detect(bundle: RendererBundle, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> str:
    """The name of the syntax in which the bundle's template writes calls. RendererError when headrace reads none."""
    reasons: dict[str, tuple[bool, str]] = {}
    for name in SYNTAXES:
        try:
            _checked(msgspec.structs.replace(bundle, renderer=name), tokenizer, tools)
        except RendererError as error:
            reasons.setdefault(str(error), (isinstance(error, NoStopToken), name))
        else:
            return name
    source = bundle.chat_template

    def distance(reason: str) -> tuple[bool, bool]:
        no_stop, name = reasons[reason]
        return not any(mark in source for mark in SYNTAXES[name].marks), no_stop

    nearest = sorted(reasons, key=distance)[:2]
    tried = "; ".join(f"{reasons[reason][1]}: {reason}" for reason in nearest)
    raise RendererError(
        f"the chat template fits none of the syntaxes {', '.join(SYNTAXES)} ({tried}); set [policy] chat_template to "
        "a template of one of them, or [policy] renderer to a renderer of your own"
    )


def _checked(bundle: RendererBundle, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> NativeRenderer:
    if not tools:
        return _without_tools(bundle, tokenizer)
    syntax = SYNTAXES[bundle.renderer]
    variables = {**bundle.special_tokens, **bundle.template_kwargs}
    try:
        template = ChatTemplate(bundle.chat_template, variables, bundle.date)
        traits = checks.traits(template, syntax, tools, bundle.system)
        conversation = Conversation(template, syntax, tools, bundle.system, traits)
        changes = checks.changes(conversation)
        renderer = NativeRenderer(tokenizer, conversation, syntax, changes, bundle.eos_ids, bundle.sha256)
        checks.round_trip(renderer, conversation)
    except TemplateRefused as error:
        raise RendererError(str(error)) from None
    return renderer


def _without_tools(bundle: RendererBundle, tokenizer: Tokenizer) -> NativeRenderer:
    """The format for conversations that offer no tool: checked with tools, because a check reads calls back."""
    checked = _checked(bundle, tokenizer, schemas.TABLE).format
    conversation = Conversation(checked.template, checked.syntax, (), bundle.system, checked.traits)
    return NativeRenderer(tokenizer, conversation, checked.syntax, checked.changes, bundle.eos_ids, bundle.sha256)
