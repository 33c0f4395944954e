"""The gateway's API keys, and secrets of a run: values in HR_KEYS, which the operator writes."""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from headrace.messages.base import Amount, Count, Message, message

Scope = Literal["turns", "agents", "feedback", "purge"]
"""The routes that a key opens: turns of the tenant's own agents; headrace's agent; ratings; the purge of a user."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
USUAL: tuple[Scope, ...] = ("turns", "agents", "feedback")
"""The scopes of a key for which none are named: a purge cannot be undone, so it is never among them."""

KEYS = "key."
"""How the names of API keys begin in HR_KEYS; the id follows."""
USERS_SECRET, PURGE_SECRET = "secret.users", "secret.purge"
"""The key that hashes users' names, of gateways; the seed that signs certificates of purges, of feedback actors."""
SECRETS: dict[str, str] = {USERS_SECRET: "gateway", PURGE_SECRET: "feedback"}
"""Name in HR_KEYS to the role that opens it; the operator opens all."""


@message("api_key")
class ApiKey(Message, frozen=True, kw_only=True):
    """An API key of a tenant. The key itself is shown once, when it is made."""

    id: str
    """The first eight digits of its hash: enough to name it in a list."""
    digest: str = ""
    """SHA-256 of the key, hexadecimal. A key is 32 random bytes, so nobody finds it by trying."""
    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    training: bool = False
    """The tenant opted in: sessions of this key may be trained on once they are rated."""
    requests_per_minute: Annotated[int, Meta(ge=1, le=2**53)] = 600
    tokens_per_minute: Count = 0
    """Tokens of prompts and turns together; 0 for no limit."""
    scopes: tuple[Scope, ...] = USUAL
    created: Amount
    """Seconds since the epoch."""


@message("sealed_secret")
class SealedSecret(Message, frozen=True, kw_only=True):
    """A secret of 32 bytes that the holders of some roles' seeds can open."""

    boxes: dict[str, bytes]
    """Public key of a role to a sealed box (X25519, XSalsa20, Poly1305) for it."""
