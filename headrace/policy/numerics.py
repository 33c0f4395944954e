"""The arithmetic of a model on this machine: exact or ordinary mode, and fingerprint.

The record stands apart from the probe that makes it (`numerics_probe`): the model needs the record, the probe runs the
model.
"""

import msgspec


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """The arithmetic of one model on one machine."""

    exact: bool
    """A position's bits are the same in sampler and trainer, whatever the batch."""
    reason: str
    """Why exact mode is off; empty when it is on."""
    fingerprint: str
    """The name of the arithmetic: processes with equal fingerprints compute the same bits."""
