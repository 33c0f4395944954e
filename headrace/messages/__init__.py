"""The contract: every struct, every subject, every stream. Importing it registers all types."""

from headrace.messages import (
    evaluation,
    judging,
    ledger,
    operations,
    plugins,
    product,
    rollout,
    sandbox,
    search,
    tasks,
    training,
    weights,
)
from headrace.messages.base import TYPES, Array, Message
from headrace.messages.codec import UnreadableMessage, decode, decode_as, encode

__all__ = [
    "TYPES",
    "Array",
    "Message",
    "UnreadableMessage",
    "decode",
    "decode_as",
    "encode",
    "evaluation",
    "judging",
    "ledger",
    "operations",
    "plugins",
    "product",
    "rollout",
    "sandbox",
    "search",
    "tasks",
    "training",
    "weights",
]
