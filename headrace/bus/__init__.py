"""The bus: typed messages over NATS, streams, the actor runtime, the embedded server, traces.

The only room that imports nats and opentelemetry. Start with `connection.Bus`, then `actor.Actor`; `server.Server` is a
broker of your own for tests and for one machine.
"""
