"""The books of a run as anyone can rebuild them from its streams, the audit over them, and the replay of a step.

The curriculum recovers from the same book that the audit reads, so what it believes and what can be proven of it are
one thing.
"""
