"""Connections from a sandbox's loopback through the host: an HTTP proxy, or an endpoint that answers them itself.

There is no network card. A process of the tools' user listens on loopback and passes bytes through the slot's channel
(a job has its standard input and output). The proxy understands CONNECT and absolute URLs; the host resolves
names and decides (vmhost/network.py), and a refused request is answered with status 403. A connection to the endpoint
(`StartEndpoint`) is open at once, and the caller of the sandbox answers it.

Layout of a record: u32 stream, u8 kind, u32 length, payload; big-endian, the same in both directions.
"""

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

PORT = 3128
OPEN, OPENED, REFUSED, DATA, TAKEN, CLOSE = range(6)
"""open: ``name:port``, empty to an endpoint (guest); opened, refused with a reason (host); data; taken: u32 number of
delivered bytes, so that the host may send as many more (guest); close."""
WINDOW = 64 << 10
"""Bytes of a stream that may be on their way to the guest."""
STREAMS = 12
"""Concurrent streams: together they never fill a job's input, which holds 1 MiB."""
TOGETHER_MS, CLOSES_MS = 2, 100
"""How long records to an endpoint wait for more, so that the head and the body of a request are one call, and that of
the next request has the end of a connection."""
_HEAD = struct.Struct("!IBI")
_LONGEST_HEAD = 16 << 10
LIMIT = 256 << 10


def record(stream: int, kind: int, payload: bytes = b"") -> bytes:
    """One record."""
    return _HEAD.pack(stream, kind, len(payload)) + payload


class Records:
    """Splits a stream of bytes into records."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The records that are complete with this data. ValueError when it does not consist of records."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            stream, kind, length = _HEAD.unpack_from(self._buffer)
            if kind > CLOSE or length > LIMIT:
                raise ValueError(f"a record of kind {kind} with {length} bytes")
            if len(self._buffer) < _HEAD.size + length:
                return
            payload = self._buffer[_HEAD.size : _HEAD.size + length]
            self._buffer = self._buffer[_HEAD.size + length :]
            yield stream, kind, payload


def target(head: bytes) -> tuple[str, bytes]:
    """A request's destination as ``name:port``, and the head for the server (empty for CONNECT). ValueError when it is
    not a proxy request."""
    first, _, rest = head.partition(b"\r\n")
    try:
        method, place, version = first.decode("ascii").split(" ")
    except (UnicodeDecodeError, ValueError):
        raise ValueError("not an HTTP request") from None
    if method == "CONNECT":
        return place, b""
    scheme, separator, place = place.partition("://")
    if not separator or scheme.lower() != "http":
        raise ValueError("expected an absolute http:// URL or CONNECT")
    name, _, path = place.partition("/")
    lines = [line for line in rest.split(b"\r\n") if not line.lower().startswith((b"proxy-", b"connection:"))]
    # One server per connection: the next request may be for another one.
    start = f"{method} /{path} {version}".encode()
    return name if ":" in name else f"{name}:80", b"\r\n".join([start, b"Connection: close", *lines])


class _Stream:
    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.head = b""
        self.rest: bytes | None = None
        """Bytes that the server gets first; None until the request's head is complete."""
        self.opened = self.connect = self.ended = False
        self.unsent = b""
        self.taken = 0
        """Bytes that were delivered and not yet reported."""


class Tunnel:
    """The event loop; it ends with standard input."""

    def __init__(self, listener: socket.socket, endpoint: bool = False) -> None:
        self._listener, self._endpoint = listener, endpoint
        self._streams: dict[int, _Stream] = {}
        self._next = 0
        self._records = Records()
        self._out = b""
        """Records to the host, which go out together once nothing more comes."""
        self._soon = False
        """Whether more than ends of connections is among them."""

    def serve(self) -> None:
        """Serve until standard input ends."""
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            if len(self._streams) < STREAMS:
                poll.register(self._listener, select.POLLIN)
            owners = {}
            for number, stream in self._streams.items():
                reads = stream.opened or stream.rest is None
                poll.register(stream.client, (select.POLLIN if reads else 0) | (select.POLLOUT if stream.unsent else 0))
                owners[stream.client.fileno()] = number
            patience = (TOGETHER_MS if self._soon else CLOSES_MS) if self._out else None
            ready = poll.poll(patience)
            if not ready:
                self._write()
            for fd, events in ready:
                if fd == 0:
                    data = os.read(0, 65536)
                    if not data:
                        return
                    for number, kind, payload in self._records.feed(data):
                        self._from_host(number, kind, payload)
                elif fd == self._listener.fileno():
                    with suppress(OSError):
                        client = self._listener.accept()[0]
                        client.setblocking(False)
                        self._next += 1
                        stream = self._streams[self._next] = _Stream(client)
                        if self._endpoint:
                            stream.opened = True
                            self._out += record(self._next, OPEN)  # with the request, not before it
                elif owners[fd] in self._streams:
                    self._from_client(owners[fd], events)

    def _from_host(self, number: int, kind: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == OPENED:
            stream.opened = True
            if stream.connect:
                stream.unsent += b"HTTP/1.1 200 Connection established\r\n\r\n"
            if stream.rest:
                self._send(record(number, DATA, stream.rest))
                stream.rest = b""
        elif kind == REFUSED:
            self._answer(number, "403 Forbidden", payload)
            return
        elif kind == DATA:
            stream.unsent += payload
        elif kind == CLOSE:
            stream.ended = True
        self._flush(number)

    def _from_client(self, number: int, events: int) -> None:
        stream = self._streams[number]
        if events & select.POLLOUT:
            self._flush(number)
        if number not in self._streams or not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        try:
            data = stream.client.recv(32768)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(number)
        elif stream.opened:
            self._send(record(number, DATA, data))
        else:
            stream.head += data
            self._head(number)

    def _head(self, number: int) -> None:
        stream = self._streams[number]
        head, end, body = stream.head.partition(b"\r\n\r\n")
        if not end:
            if len(stream.head) > _LONGEST_HEAD:
                self._answer(number, "431 Request Header Fields Too Large", b"the request's head is too long")
            return
        try:
            place, start = target(head)
        except ValueError as error:
            self._answer(number, "400 Bad Request", str(error).encode())
            return
        stream.connect = not start
        stream.rest = start + b"\r\n\r\n" + body if start else body
        self._send(record(number, OPEN, place.encode()))

    def _answer(self, number: int, status: str, text: bytes) -> None:
        stream = self._streams[number]
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(text) + 1}\r\nConnection: close"
        stream.unsent += head.encode() + b"\r\n\r\n" + text + b"\n"
        stream.ended, stream.rest = True, b""
        self._flush(number)

    def _flush(self, number: int) -> None:
        stream = self._streams[number]
        try:
            sent = stream.client.send(stream.unsent) if stream.unsent else 0
        except BlockingIOError:
            return
        except OSError:
            self._drop(number)
            return
        stream.unsent = stream.unsent[sent:]
        stream.taken += sent if stream.opened else 0
        if stream.taken >= WINDOW // 2:  # a short answer needs no report
            self._send(record(number, TAKEN, struct.pack("!I", stream.taken)))
            stream.taken = 0
        if stream.ended and not stream.unsent:
            self._drop(number)

    def _drop(self, number: int) -> None:
        stream = self._streams.pop(number)
        stream.client.close()
        if not (self._endpoint and stream.ended):  # the host closed it
            self._send(record(number, CLOSE), soon=False)

    def _send(self, data: bytes, soon: bool = True) -> None:
        self._out += data
        self._soon |= soon
        if not self._endpoint or len(self._out) >= LIMIT // 2:
            self._write()

    def _write(self) -> None:
        data, self._out, self._soon = self._out, b"", False
        while data:
            data = data[os.write(1, data) :]


def listen(port: int = PORT) -> socket.socket:
    """A listening socket: on this port, or on a free one where other sandboxes share the loopback."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError:
        listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


def serve(listener: socket.socket, endpoint: bool = False) -> None:
    """In a fork of the agent, as the tools' user: report that a proxy listens, then serve."""
    if not endpoint:
        os.write(1, record(0, OPENED))
    Tunnel(listener, endpoint).serve()
