"""The embedded engine as a part of the seam ``headrace.engines``: torch is imported when an engine is opened."""

from typing import TYPE_CHECKING

from headrace.engines.registry import EngineSetup

if TYPE_CHECKING:
    from headrace.engines.embedded.engine import EmbeddedEngine


async def open_engine(setup: EngineSetup) -> "EmbeddedEngine":
    """An engine in this process. UnusableEngine when exact mode is asked for and this machine has none."""
    from headrace.engines.embedded.open import open_engine

    return await open_engine(setup)
