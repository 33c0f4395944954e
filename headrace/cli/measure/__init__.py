"""Commands that measure policies and judges."""
