"""tokenizer.json and its companions from the tokenizer that a GGUF file carries.

Idea: GGUF has the vocabulary and the merges of a byte-level BPE, but of the pre-tokenizer nothing except its name
(`tokenizer.ggml.pre`). Here each supported name becomes the pre-tokenizer of the original tokenizer.json; an unknown
name is refused, because a wrong pre-tokenizer fails in silence: texts still encode, to other ids than the model was
trained on (transformers' own import drops SmolLM2's split of digits, so that indented numbers differ).
"""

from typing import Any

from headrace.policy.config import CheckpointError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""`tokenizer.ggml.token_type`."""


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes(False)]}


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _bytes(True),
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(True)]},
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
"""By `tokenizer.ggml.pre`."""


def files(fields: dict[str, Any], max_positions: int) -> dict[str, dict[str, Any]]:
    """File name -> content: tokenizer.json, tokenizer_config.json, generation_config.json.

    fields: the key-value pairs of the GGUF file. CheckpointError when the tokenizer is not supported.
    """
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)}")
    texts: list[str] = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    ids["padding"] = ids["eos"] if ids["padding"] is None else ids["padding"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **{names[name]: texts[id] for name, id in ids.items() if id is not None},
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    generation = {
        f"{name}_token_id": id
        for name, id in (("bos", ids["bos"]), ("eos", ids["eos"]), ("pad", ids["padding"]))
        if id is not None
    }
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))
    return {
        "tokenizer.json": _tokenizer(fields, pre, texts, ids["bos"] if adds_bos else None),
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }


def _tokenizer(fields: dict[str, Any], pre: str, texts: list[str], bos: int | None) -> dict[str, Any]:
    """The content of tokenizer.json. bos: the id that is put before every text; None puts nothing there."""
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for id, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    first = None
    if bos is not None:
        start = {"SpecialToken": {"id": texts[bos], "type_id": 0}}
        first = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, start, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {texts[bos]: {"id": texts[bos], "ids": [bos], "tokens": [texts[bos]]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": first,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {text: id for id, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind != _UNUSED},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }
