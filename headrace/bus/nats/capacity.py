"""Whether the stream of versions can hold what a run keeps of them: asked by `headrace up` before it starts actors, and
by the weight sender, which others may have started."""

from headrace.bus.nats import streams
from headrace.bus.nats.connection import NatsConnection
from headrace.config import Config, versions

WEIGHTS = "HR_WEIGHTS"


async def lacking(connection: NatsConnection, config: Config, file_bytes: int) -> str:
    """Why the stream or its account is too small for the chains that a run keeps, and what to set; empty when it is
    not. file_bytes: of the file of a version. BusError when the broker does not answer."""
    needed = versions.stream_bytes(config, file_bytes)
    limit = (await streams.size_of(connection, WEIGHTS)).limit
    account = await streams.storage_limit(connection)
    for most, what in ((limit, f"the stream {WEIGHTS}"), (account, "the broker's account")):
        if 0 < most < needed:
            chains = f"{versions.chains_kept(config)} chains of deltas to versions of {file_bytes} bytes"
            fit = versions.how_to_fit(config)
            return f"{what} may hold {most} bytes, and the run needs {needed} there: {chains}; {fit}"
    return ""
