"""The policy: one decoder for sampler and trainer, its checkpoint files, the numerics probe of exact mode, and
scoring."""
