"""Losses of `headrace.losses` for tests of failing steps; ranks import them too. The environment says when they fail:

FAILING_RANKS: the ranks that fail, such as `0,1`; FAILING_WHILE: they fail while this file exists.
"""

import os
import threading
from pathlib import Path

from headrace.algorithms.corrections import Corrected, Correction, SampledTokens, truncated


def failing() -> bool:
    """Whether this process is to fail now."""
    ranks = os.environ["FAILING_RANKS"].split(",")
    return os.environ.get("RANK", "0") in ranks and Path(os.environ["FAILING_WHILE"]).exists()


def raising(tokens: SampledTokens, settings: Correction) -> Corrected:
    """Raises."""
    if failing():
        raise RuntimeError("out of luck")
    return truncated(tokens, settings)


def blocking(tokens: SampledTokens, settings: Correction) -> Corrected:
    """Never returns; a file `<FAILING_WHILE>.reached` says that it has begun."""
    if failing():
        Path(os.environ["FAILING_WHILE"] + ".reached").touch()
        threading.Event().wait()
    return truncated(tokens, settings)
