"""The bus: typed messages over NATS, streams, the actor runtime, the embedded server, traces.

The only folder that imports nats and opentelemetry. Start with `connection.Bus`, then `actor.Actor`;
`broker.server.Server` starts a broker for tests and for one machine.
"""

from headrace.bus.lazy import delay_import

delay_import("aiohttp")
