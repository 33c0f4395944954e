"""headrace: reinforcement learning for coding agents, as actors on a NATS message bus."""

__version__ = "0.1.0"
