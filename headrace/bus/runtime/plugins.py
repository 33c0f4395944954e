"""All nodes of a run use the same plugins: the first actor that uses one records its hash, every other one compares.

The record is a key of HR_STATE, ``plugins.<run>.<seam>.<name>``, written only if it is not there. An actor whose own
source has another hash refuses to start, because no replay could repeat its results (Law 4).
"""

from collections.abc import Sequence
from hashlib import blake2b

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, Unrecoverable, WrongSequence
from headrace.messages.plugins import Plugin
from headrace.messages.subjects import token
from headrace.registry import differing


def key_of(run: str, plugin: Plugin) -> str:
    """The key of a plugin's record. It ends in a hash of the name, because a key cannot hold every letter of it."""
    name = f"{token(plugin.name)}-{blake2b(plugin.name.encode(), digest_size=4).hexdigest()}"
    return f"plugins.{token(run)}.{plugin.seam}.{name}"


async def agree(bus: Bus, run: str, plugins: Sequence[Plugin]) -> None:
    """Record the plugins of this actor, or compare them with the run's. Unrecoverable where a source differs."""
    if not plugins:
        return
    state = await bus.kv("HR_STATE")
    for plugin in plugins:
        key = key_of(run, plugin)
        try:
            await state.create(key, plugin)
        except WrongSequence:
            entry = await state.get(key)
            if entry is None or not isinstance(entry[0], Plugin):
                raise BusError(f"HR_STATE has no readable plugin under {key}") from None
            if sentence := differing([entry[0]], [plugin]):
                raise Unrecoverable(f"PluginError: {sentence}") from None
