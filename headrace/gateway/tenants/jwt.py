"""The signed tokens of NATS: JSON claims, signed with an Ed25519 key, in the form of a JWT.

Three of them take part in a connection that an auth service decides on: the broker's request, the service's answer, and
inside that answer the claims of the new user. Documents: ADR-26 of nats-io/nats-architecture-and-design (auth callout),
github.com/nats-io/jwt version 2 (claims).
"""

import base64
import time
from typing import Any

import msgspec

from headrace.bus.broker.keys import Key

_HEADER = b'{"typ":"JWT","alg":"ed25519-nkey"}'


class ConnectOptions(msgspec.Struct):
    """The parts of a client's CONNECT that can carry an API key, and the name of the user."""

    user: str = ""
    password: str = msgspec.field(name="pass", default="")
    token: str = msgspec.field(name="auth_token", default="")


class ServerId(msgspec.Struct):
    """The broker that asks."""

    id: str


class Asked(msgspec.Struct):
    """The ``nats`` part of a request: may this client connect?"""

    server_id: ServerId
    user_nkey: str
    """Public key under which the broker will know the connection."""
    connect_opts: ConnectOptions = msgspec.field(default_factory=ConnectOptions)


class _Request(msgspec.Struct):
    nats: Asked


def read_request(token: bytes) -> Asked:
    """The content of the broker's request. ValueError when it is none.

    The signature is not checked: the permissions of the bus let the broker alone send such requests, and the answer is
    of no use to anybody else.
    """
    parts = token.split(b".")
    if len(parts) != 3:
        raise ValueError("expected a JWT of three parts")
    claims = base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4))
    return msgspec.json.decode(claims, type=_Request).nats


def user(issuer: Key, subject: str, *, name: str, account: str, until: float, rights: dict[str, Any]) -> str:
    """The claims of a user. subject: its public key; until: end of the connection, in seconds since the epoch; rights:
    ``pub``, ``sub`` and the like."""
    unlimited = {"subs": -1, "data": -1, "payload": -1}
    content = rights | unlimited | {"type": "user", "version": 2}
    return _signed(issuer, {"sub": subject, "name": name, "aud": account, "exp": int(until), "nats": content})


def response(issuer: Key, asked: Asked, *, jwt: str = "", error: str = "") -> bytes:
    """The answer to a request: the user's claims or the reason of a refusal, which only the broker's log shows."""
    content = {"jwt": jwt} if jwt else {"error": error}
    content |= {"type": "authorization_response", "version": 2}  # type: ignore[dict-item]
    return _signed(issuer, {"sub": asked.user_nkey, "aud": asked.server_id.id, "nats": content}).encode()


def _signed(issuer: Key, claims: dict[str, Any]) -> str:
    claims = {"iss": issuer.account, "iat": int(time.time())} | claims
    text = _part(_HEADER) + b"." + _part(msgspec.json.encode(claims))
    return (text + b"." + _part(issuer.sign_bytes(text))).decode()


def _part(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
