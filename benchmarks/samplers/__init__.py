"""Hundreds of simulated samplers with recorded durations against the real broker, curriculum, judge and ledger."""
