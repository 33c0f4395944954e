"""Which role may call which method of which service: `hr.rpc.<service>.<caller>...<method>`.

The broker lets a role publish under its own name alone, and to its services alone (`filters`). A service subscribes per
method to the callers of that method alone (`callers`), so a call by another role has no responder. The caller is thus
known from the subscription, and nothing in a message can claim another one.
"""

from headrace.messages import subjects as s

_USE_SANDBOXES = ("rollout", "judge", "certifier")

CALLERS: dict[str, dict[str, tuple[str, ...]]] = {
    "environment": {
        "acquire": _USE_SANDBOXES,
        "call": _USE_SANDBOXES,
        "renew": _USE_SANDBOXES,
        "release": _USE_SANDBOXES,
        "release_group": ("judge",),
        "fork": ("rollout",),
    },
    "rollout": {
        "turn": ("gateway",),
        "end": ("gateway",),
        "command": ("gateway",),
        "control": ("gateway", "feedback"),
    },
    "feedback": {"purge": ("gateway", "operator"), "dropped": ("gateway", "rollout"), "fate": ("gateway",)},
    "search": {"query": ("rollout",)},
}
"""Service to method to the roles that call it. In subjects a method may end in ``-<run>``."""

IN_PARTS = {"rollout": "gateway"}
"""Service to the caller to which it may send parts of an answer before the answer itself: a turn as it is sampled."""

PING = "ping"
"""The method that every actor serves under its own id."""
PINGING = ("operator",)


def callers(service: str, method: str) -> tuple[str, ...]:
    """The roles that may call a method. KeyError for a method that the table does not have."""
    return PINGING if method == PING else CALLERS[service][method]


def filters(role: str) -> tuple[str, ...]:
    """The subjects on which a role may publish calls."""
    called = [service for service, methods in CALLERS.items() if any(role in roles for roles in methods.values())]
    pings = [s.RPC_NODE.where(caller=role, method=PING)] if role in PINGING else []
    return tuple([s.RPC.where(service=service, caller=role) for service in called] + pings)
