"""Whether a folder has the weights of a policy, by the headers of its files."""

from pathlib import Path

import msgspec

from headrace.policy.config import PolicyConfig
from headrace.policy.layout.pieces import Pieces
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build


def refuse(config: PolicyConfig, folder: Path) -> None:
    """CheckpointError where a folder's files lack a part of this policy, by their headers: no tensor is read."""
    numerics = Numerics(exact=False, reason="it computes nothing", fingerprint="")
    config = msgspec.structs.replace(config, adapter=None)
    Pieces(
        config,
        folder,
        {name: tuple(view.shape) for name, view in build(config, numerics, device="meta").views().items()},
    )
