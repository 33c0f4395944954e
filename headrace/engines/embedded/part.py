"""The embedded engine as a part of the seam ``headrace.engines``. It imports torch only when an engine is opened."""

from typing import TYPE_CHECKING

from headrace.engines.registry import EngineSetup

if TYPE_CHECKING:
    from headrace.engines.embedded.engine import EmbeddedEngine


async def open_engine(setup: EngineSetup) -> "EmbeddedEngine":
    """An engine in this process. UnusableEngine when exact mode is configured and this machine has none."""
    from headrace.engines.embedded.open import open_engine

    return await open_engine(setup)
