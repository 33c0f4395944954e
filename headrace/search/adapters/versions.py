"""Adapters on the bus: their bytes on HR_BLOB, a version of each in HR_ADAPTERS.

A version is never deleted, so that a replay finds the adapter that a search used; a withdrawn one is only not used.
"""

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import CorruptPayload, MessageGone
from headrace.bus.runtime.plugins import key_of
from headrace.messages.codec import UnreadableMessage
from headrace.messages.plugins import Plugin
from headrace.messages.search import SearchAdapter, SearchAdapterVersion, adapter_key
from headrace.search.adapters.adapter import Adapter, AdapterError
from headrace.search.models import PLUGIN, identity_of

BUCKET = "HR_ADAPTERS"


async def published(bus: Bus, run: str) -> dict[int, SearchAdapterVersion]:
    """The versions of a run by the revision of their last write, the newest first; withdrawn ones too."""
    entries = (await (await bus.kv(BUCKET)).items(adapter_key(run))).values()
    versions = {seq: version for version, seq in entries if isinstance(version, SearchAdapterVersion)}
    return dict(sorted(versions.items(), reverse=True))


async def publish(bus: Bus, run: str, adapter: SearchAdapter) -> None:
    """Store an adapter and make it the run's current one. AdapterError for one without a measured gain, or of another
    model than the run's search actors have."""
    state, plugins = await bus.kv(BUCKET), await bus.kv("HR_PLUGINS")
    recorded = await plugins.items(key_of("*", run, Plugin(seam=PLUGIN.seam, name=PLUGIN.name, source="")))
    models = [plugin for plugin, _ in recorded.values() if isinstance(plugin, Plugin)]
    agreed = identity_of(models[0].source) if models else adapter.model
    Adapter(adapter, agreed)
    version = SearchAdapterVersion(run=run, hash=adapter.hash, blob=await bus.put_blob(adapter))
    await state.put(adapter_key(run, adapter.hash), version)


async def withdraw(bus: Bus, run: str) -> SearchAdapterVersion:
    """Withdraw the current version; the one before it is the next. AdapterError when there is none."""
    for version in (await published(bus, run)).values():
        if not version.withdrawn:
            gone = msgspec.structs.replace(version, withdrawn=True)
            await (await bus.kv(BUCKET)).put(adapter_key(run, version.hash), gone)
            return gone
    raise AdapterError(f"run {run} has no adapter in use")


async def read(bus: Bus, version: SearchAdapterVersion) -> SearchAdapter:
    """The adapter of a version. AdapterError when its bytes are gone, damaged or another's."""
    try:
        adapter = await bus.get_blob(version.blob)
    except (MessageGone, CorruptPayload, UnreadableMessage) as error:
        raise AdapterError(f"adapter {version.hash} is not on the bus any more: {error}") from None
    if not isinstance(adapter, SearchAdapter) or adapter.hash != version.hash:
        raise AdapterError(f"adapter {version.hash}: HR_BLOB has another content under its name")
    return adapter


async def named(bus: Bus, run: str, models: set[str]) -> dict[str, Adapter]:
    """The adapters that identities of models name behind a ``+``, by identity. AdapterError when one is gone."""
    versions = {version.hash: version for version in (await published(bus, run)).values()}
    adapters: dict[str, Adapter] = {}
    for name in models:
        model, plus, hash = name.partition("+")
        if not plus:
            continue
        if hash not in versions:
            raise AdapterError(f"adapter {hash} is not on the bus of run {run} any more")
        adapters[name] = Adapter(await read(bus, versions[hash]), model)
    return adapters
