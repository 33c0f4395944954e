"""The policy: one Qwen3-MoE-compatible model for sampler and trainer, its tokenizer and renderer, its checkpoint files,
the numerics probe behind exact mode, and the scoring that checks it."""
