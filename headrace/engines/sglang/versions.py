"""The SGLang releases that this client was measured with (docs/sglang.md)."""

VERSIONS = ("0.5.23",)
