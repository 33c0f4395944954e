"""The contract: every struct, every subject, every stream. Importing it registers all types."""

from headrace.messages import (
    evaluation,
    judging,
    ledger,
    operations,
    product,
    rollout,
    sandbox,
    tasks,
    training,
    weights,
)
from headrace.messages.base import TYPES, Array, Message
from headrace.messages.codec import UnknownType, decode, decode_as, encode

__all__ = [
    "TYPES",
    "Array",
    "Message",
    "UnknownType",
    "decode",
    "decode_as",
    "encode",
    "evaluation",
    "judging",
    "ledger",
    "operations",
    "product",
    "rollout",
    "sandbox",
    "tasks",
    "training",
    "weights",
]
