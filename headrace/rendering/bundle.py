"""Makes a run's bundle, once, from the checkpoint's files and the configuration.

``auto`` is resolved here, at the start of a run, where an operator reads the error. Terse tags in the tokenizer select
the terse format. Otherwise the chat template writes a call, and the syntax that parses this call is selected.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.messages.rollout import RendererBundle
from headrace.rendering import schemas, tiktoken
from headrace.rendering.base import RendererError
from headrace.rendering.native.opening import detect
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.registry import SYSTEM, Renderers, source_hash
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.tokenizer import Tokenizer

_TEMPLATE = "chat_template.jinja"


def terse_bundle(tokenizer_json: str, tools: Sequence[ToolSchema] = schemas.TABLE) -> RendererBundle:
    """The bundle of a policy that headrace makes itself. tools: all that the run's tasks may offer."""
    return RendererBundle(
        renderer="terse", tokenizer_json=tokenizer_json, tools=schemas.functions_json(schemas.terse(tools))
    )


def checkpoint_bundle(
    folder: Path,
    renderer: str = "auto",
    chat_template: str = "",
    template_kwargs: Mapping[str, bool | int | float | str] | None = None,
    date: datetime.date | None = None,
    tools: Sequence[ToolSchema] = schemas.TABLE,
    system: str = "",
) -> RendererBundle:
    """The bundle of a Hugging Face folder. RendererError names the missing part.

    renderer, chat_template, template_kwargs: as in ``[policy]``. date: what templates see as today; today by default.
    tools: all that the run's tasks may offer. system: the system's text; empty for `SYSTEM`.
    """
    tokenizer_json = _tokenizer_json(folder)
    tokenizer = Tokenizer.parse(tokenizer_json)
    is_terse = tokenizer.tag("<turn>") is not None and tokenizer.tag("</turn>") is not None
    if renderer == "terse" or (renderer == "auto" and is_terse):
        bundle = terse_bundle(tokenizer_json, tools)
    else:
        bundle = _chat_bundle(folder, tokenizer, tokenizer_json, chat_template)
        bundle = msgspec.structs.replace(
            bundle,
            system=system or SYSTEM,
            template_kwargs=dict(template_kwargs or {}),
            date=(date or datetime.date.today()).isoformat(),
            tools=schemas.functions_json(tools),
        )
        name = detect(bundle, tokenizer, tools) if renderer == "auto" else renderer
        bundle = msgspec.structs.replace(bundle, renderer=name, plugin=source_hash(name))
    Renderers(bundle).open(tools)  # fails here rather than on every node
    return bundle


def _tokenizer_json(folder: Path) -> str:
    """The folder's tokenizer.json, or one that is made from its tiktoken.model."""
    file = folder / "tokenizer.json"
    if not file.exists() and (folder / tiktoken.FILE).exists():
        return tiktoken.converted(folder)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise RendererError(f"{file} cannot be read: {error.strerror}") from None


def _chat_bundle(folder: Path, tokenizer: Tokenizer, tokenizer_json: str, chat_template: str) -> RendererBundle:
    """The files of the folder as a bundle without a renderer's name."""
    settings = _json(folder / "tokenizer_config.json")
    generation = _json(folder / "generation_config.json")
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    eos = {*_ids(generation.pop("eos_token_id", None)), *_ids(_json(folder / "config.json").get("eos_token_id"))}
    if (id := tokenizer.tag(special.get("eos_token", ""))) is not None:
        eos.add(id)
    return RendererBundle(
        renderer="",
        tokenizer_json=tokenizer_json,
        chat_template=_template(folder, settings, chat_template),
        special_tokens=special,
        eos_ids=tuple(sorted(eos)),
        generation={key: value for key, value in generation.items() if isinstance(value, bool | int | float | str)},
    )


def _template(folder: Path, settings: Mapping[str, Any], override: str) -> str:
    """The template in the configured file, the folder's own, or tokenizer_config.json: a text, or one of a list."""
    for file in [Path(override)] if override else [folder / _TEMPLATE]:
        if override or file.exists():
            try:
                return file.read_text(encoding="utf-8")
            except OSError as error:
                raise RendererError(f"the chat template {file} cannot be read: {error.strerror}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str):
        raise RendererError(
            f"{folder} has no chat template (neither {_TEMPLATE} nor chat_template in tokenizer_config.json) and its "
            f"tokenizer has no terse tags; set [policy] chat_template to a file in the syntax of the model, one of "
            f"{', '.join(SYNTAXES)}"
        )
    return template


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file. RendererError when it cannot be read."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RendererError(f"{file} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> list[int]:
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)]
