"""All nodes of a run use the same plugins: the first actor that uses one records its hash, every other one compares.

A role's record is a key of HR_PLUGINS, ``<role>.<run>.<seam>.<name>``, written only if it is not there. An actor whose
own source has another hash than any role's record refuses to start, because no replay could repeat its results (Law 4).
"""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, Unrecoverable, WrongSequence
from headrace.messages.plugins import Plugin
from headrace.messages.subjects import token
from headrace.registry import differing


def key_of(role: str, run: str, plugin: Plugin) -> str:
    """The key of a role's record of a plugin; ``*`` as the role stands for all of them. It ends in a hash of the name,
    because a key cannot hold every letter of it."""
    name = f"{token(plugin.name)}-{blake2b(plugin.name.encode(), digest_size=4).hexdigest()}"
    return f"{role}.{token(run)}.{plugin.seam}.{name}"


async def agree(bus: Bus, run: str, plugins: Sequence[Plugin]) -> None:
    """Record this actor's plugins, and compare them with what the run's other roles recorded. Unrecoverable where a
    source differs: of two actors that record at the same time, at least one reads the other's."""
    if not plugins:
        return
    records = await bus.kv("HR_PLUGINS")
    for plugin in plugins:
        with suppress(WrongSequence):
            await records.create(key_of(bus.role, run, plugin), plugin)
        for recorded, _ in (await records.items(key_of("*", run, plugin))).values():
            if not isinstance(recorded, Plugin):
                raise BusError(f"HR_PLUGINS holds a {type(recorded).__name__} under {key_of('*', run, plugin)}")
            if sentence := differing([recorded], [plugin]):
                raise Unrecoverable(f"PluginError: {sentence}") from None
