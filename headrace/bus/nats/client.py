"""nats-py's client with its defects fixed: the only file that uses private members of nats-py.

nats-py 2.16 has no public way to sign in with a key that is held in memory, to end a subscription without losing what
is under way, to flush commands that wait for its flusher, or to parse a stored header block. It also has a defect that
stops a connection after the broker has paused: a flush that timed out leaves its cancelled future in the list of
expected pongs, the late pong resolves it, and the InvalidStateError ends the read loop. The connection then hears
nothing until three pings are missed, 60 to 80 s later. Bytes that are not UTF-8, in a subject or in the status line of
a header block, end its read loop in the same way; the broker stores such messages without an error.

`PRIVATE` names every private member that this file uses; a test looks for each of them in the installed nats-py.
"""

import re
from collections.abc import Callable
from functools import lru_cache

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

PRIVATE: dict[type, tuple[str, ...]] = {
    Client: (
        "_build_message",
        "_connect_command",
        "_error_cb",
        "_flush_pending",
        "_flush_queue",
        "_parse_header_lines",
        "_pongs",
        "_process_headers",
        "_process_msg",
        "_process_pong",
        "_public_nkey",
        "_remove_sub",
        "_send_command",
        "_server_info",
        "_send_publish",
        "_send_unsubscribe",
        "_transport",
    ),
    Subscription: ("_id", "_pending_queue", "_stop_processing"),
    TcpTransport: ("_io_writer",),
}
"""Class of nats-py to the private members that are used here."""
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class NoTls(nats.errors.Error):
    """The broker offers no TLS, and the client has to use it."""


class NatsClient(Client):
    """A nats-py client that survives late pongs and can end subscriptions in order."""

    tls_only = False
    """Whether a broker that offers no TLS is refused, also at a reconnect."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once: dict[int, Callable[[Msg], None]] = {}

    def _connect_command(self) -> bytes:
        """The first command, which follows the handshake."""
        if self.tls_only and not self._server_info.get("tls_required"):
            raise NoTls("the broker offers no TLS")
        command: bytes = super()._connect_command()
        return command

    def set_public_key(self, public: str) -> None:
        """Sign in with this NKEY; the signature comes from the `signature_cb` option of `connect`."""
        self._public_nkey = public

    async def _process_pong(self) -> None:
        """Resolve the oldest expected pong. One whose flush was cancelled or timed out is only counted."""
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Deliver a message. A subject that is no UTF-8 is delivered with replacement characters."""
        if not subject.isascii():
            subject = subject.decode("utf-8", "replace").encode()
        handle = self._at_once.get(sid)
        if handle is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            handle(self._build_message(sid, subject, reply, data, await self._process_headers(headers)))
        except Exception as error:  # it must not end the read loop
            await self._error_cb(error)

    async def subscribe_at_once(self, subject: str, handle: Callable[[Msg], None]) -> None:
        """A subscription for the connection's life whose messages go to `handle` as they are read: no queue and no task
        in between."""

        async def never(message: Msg) -> None:
            raise AssertionError(message.subject)

        subscription = await self.subscribe(subject, cb=never)
        self._at_once[subscription._id] = handle

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """The headers of a message; what cannot be parsed is left out."""
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
            return parsed
        except (ValueError, LookupError):
            return parse_headers(headers) or None

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, str] | None
    ) -> None:
        """Send a publish in one piece: nats-py builds the header block in six calls a header."""
        block = "".join([f"{name}: {value}\r\n" for name, value in (headers or {}).items()])
        if not headers or block.count("\n") + block.count("\r") != 2 * len(headers) or not _plain(tuple(headers)):
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        head = f"NATS/1.0\r\n{block}\r\n".encode()
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        line = f"HPUB {subject} {reply} {len(head)} {len(head) + payload_size}\r\n".encode()
        await self._send_command(b"".join((line, head, payload, b"\r\n")))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def write_pending(self) -> None:
        """Write all buffered commands to the socket and wait until that is done."""
        await self._flush_pending(force_flush=True)

    def expect_no_pongs(self) -> None:
        """Cancel the flushes that wait for a pong: on a broken connection none arrives, and nats-py forgets them at a
        reconnect, so that each would wait for its time limit."""
        for pong in self._pongs:
            pong.cancel()

    def abort(self) -> None:
        """Close the socket at once; what was not sent is lost."""
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()

    async def announce_unsubscribe(self, subscription: Subscription) -> None:
        """Tell the broker to send nothing more on a subscription; deliveries under way still arrive."""
        await self._send_unsubscribe(subscription._id)

    async def deliveries_handled(self, subscription: Subscription) -> None:
        """Return when the callback has returned for every message that has arrived."""
        await subscription._pending_queue.join()

    def forget(self, subscription: Subscription) -> None:
        """End a subscription on this side: its callback gets nothing more, and a reconnect does not renew it."""
        subscription._stop_processing()
        self._remove_sub(subscription._id)


@lru_cache(256)
def _plain(names: tuple[str, ...]) -> bool:
    """Whether these are header names as the protocol has them."""
    return all(_NAME.fullmatch(name) for name in names)


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a stored message: a ``NATS/1.0`` line, then one ``Name: value`` line each. Empty for no block."""
    headers: dict[str, str] = Client._parse_header_lines(block.partition(b"\r\n")[2]) if block else {}
    return headers
