"""Decides on connections of tenants: a client with an API key of this gateway becomes a user of the broker.

The broker asks on ``$SYS.REQ.USER.AUTH`` about every client that signs in without the key of a role (auth callout,
NATS 2.10). A client with a known API key, as password or token, becomes a user that may publish on
``hr.tenant.<id of the key>.>`` and read the inboxes under ``_INBOX.tenant.<id of the key>.``. After `LIFE_S` the broker
ends the connection and the client signs in again; so a revoked key is of no use after that time. On a broker with an
account per run the user name is the run, and each gateway decides on the clients of its own run alone. Without a
running gateway no tenant connects; actors do not depend on it.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bus.broker import credentials
from headrace.bus.broker.permissions import CALLOUT_ROLE
from headrace.bus.connection import Bus, RawMessage
from headrace.bus.errors import Unrecoverable
from headrace.gateway.tenants import jwt
from headrace.gateway.tenants.keys import ApiKey, ApiKeys
from headrace.messages import subjects

ASKED = "$SYS.REQ.USER.AUTH"
LIFE_S = 600.0
"""Seconds after which a tenant's connection ends and the client has to sign in again."""
Event = Callable[[str, str, Literal["info", "warning"]], Awaitable[None]]
"""kind, text, level"""


class Callout:
    """The auth service of one gateway. Call `start`, later `stop`."""

    def __init__(self, keys: ApiKeys, event: Event) -> None:
        self._keys, self._event = keys, event
        self._bus: Bus | None = None

    async def start(self, url: str, seeds: Path | None) -> None:
        """Connect in the role of the auth service and answer. seeds: the gateway's own credentials. Unrecoverable when
        the broker was not prepared for tenants."""
        folder = credentials.tenants_folder(seeds)
        if folder is None:
            raise Unrecoverable(
                f"[production] broker_tenants is set and {seeds or 'this broker'} has no key of an auth service: make "
                "it with `python -m headrace.bus.broker.credentials FOLDER --tenants` and restart the broker"
            )
        self._issuer = credentials.issuer(folder)
        self._account = credentials.account_of(seeds)
        self._bus = await Bus.connect(url, role=CALLOUT_ROLE, credentials=folder)
        await self._bus.listen_raw(ASKED, self._decide)

    async def stop(self) -> None:
        """End the connection."""
        if self._bus is not None:
            await self._bus.close()

    async def _decide(self, raw: RawMessage) -> None:
        """Answer one request of the broker, or leave it to the gateway of another run."""
        assert self._bus is not None
        try:
            asked = jwt.read_request(raw.data)
        except (ValueError, msgspec.DecodeError) as error:
            await self._event("callout_unreadable", str(error), "warning")
            return
        options = asked.connect_opts
        if self._account and options.user != self._account:
            return
        key = self._keys.find(options.password or options.token)
        if key is None:
            answer = jwt.response(self._issuer, asked, error="the API key is unknown or revoked")
        else:
            answer = jwt.response(self._issuer, asked, jwt=self._user(asked, key))
        await self._bus.connection.send(raw.reply, answer)

    def _user(self, asked: jwt.Asked, key: ApiKey) -> str:
        rights = {
            "pub": {"allow": [subjects.TENANT.where(key=key.id)]},
            "sub": {"allow": [f"_INBOX.tenant.{key.id}.>"]},
            "allowed_connection_types": ["STANDARD"],
        }
        until = time.time() + LIFE_S
        return jwt.user(
            self._issuer, asked.user_nkey, name=key.tenant, account=self._account or "$G", until=until, rights=rights
        )
