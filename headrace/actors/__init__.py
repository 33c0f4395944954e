"""The actors: each receives typed messages, calls a library, and publishes. They never import each other."""
