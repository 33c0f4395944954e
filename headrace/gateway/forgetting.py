"""Removes purged users from a gateway: it drops their sessions, and marks their later ratings.

A purge begins with an entry of the deny-list in HR_PRODUCT. Every gateway follows the list, so a purge by an operator's
command reaches each of them.
"""

import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from headrace.bus.connection import Bus
from headrace.gateway.http import HttpRefused, answer
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.user_keys import UserKeys
from headrace.messages import subjects
from headrace.messages.operations import Ack
from headrace.messages.product import ApiKey, DeniedUser, PurgeCertificate, PurgeUser, UserDropped, denied_key

PURGE_S = 60.0


class Forgetting:
    """The deny-list of a gateway's run, and the endpoint that purges a user."""

    def __init__(
        self, bus: Bus, run: str, id: str, keys: UserKeys, ratings: Ratings, drop: Callable[[str], Awaitable[None]]
    ) -> None:
        """id: of the gateway. drop: removes its data of a user, by the user's hash."""
        self._bus, self._run, self._id, self._keys = bus, run, id, keys
        self._ratings, self._drop = ratings, drop
        self._newest = 0

    async def recover(self) -> None:
        """Read the list. The users in it have no sessions left, because their purge deleted them from HR_SESSION."""
        values = await self._bus.kv("HR_PRODUCT")
        for entry, revision in (await values.items(denied_key(self._run, "*"))).values():
            self._newest = max(self._newest, revision)
            if isinstance(entry, DeniedUser) and not entry.readmitted:
                self._ratings.denied.add(entry.user)

    async def follow(self) -> None:
        """Remove the user of every new entry, unless the entry readmits the user."""
        values = await self._bus.kv("HR_PRODUCT")
        async for _, entry, revision in values.watch(denied_key(self._run, "*")):
            if isinstance(entry, DeniedUser) and entry.readmitted:
                self._ratings.denied.discard(entry.user)
            elif isinstance(entry, DeniedUser) and revision > self._newest:
                self._ratings.denied.add(entry.user)
                await self._drop(entry.user)
                where = subjects.RPC.at(service="feedback", caller="gateway", method="dropped")
                await self._bus.emit(where, UserDropped(user=entry.user, actor=f"gateway.{self._id}"))

    async def delete(self, request: web.Request, key: ApiKey) -> web.Response:
        """DELETE /v1/users/USER: purge a user of the key's tenant everywhere, and answer with the certificate."""
        began = time.monotonic()
        try:
            user = self._keys.hash(key.tenant, request.match_info["user"])
        except UnicodeEncodeError:
            raise HttpRefused(400, "the user's name is not valid UTF-8") from None
        await self._drop(user)
        subject = subjects.RPC.at(service="feedback", caller="gateway", method="purge")
        done = await self._bus.request(subject, PurgeUser(user=user), timeout=PURGE_S)
        if not isinstance(done, PurgeCertificate):
            detail = done.detail if isinstance(done, Ack) else f"unexpected answer {done.type_name}"
            raise HttpRefused(503, f"the user was not purged: {detail}")
        certificate = msgspec.to_builtins(done)
        return answer(
            {"purged": done.detail, "seconds": round(time.monotonic() - began, 3), "certificate": certificate}
        )
