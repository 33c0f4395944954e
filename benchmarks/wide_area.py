"""Simulates a hub and distant regions on one machine: network namespaces joined by a router process.

Idea: every place is a network namespace with one TUN device; a process reads packets from all of them and lets each
through when its link would have delivered it: rate, one-way delay, a queue of two bandwidth-delay products, and a
switch that drops everything. The endpoints are the kernel's own TCP, set as deploy/regions advises. Why not tc: netem
is absent from many kernels, and tbf shapes but does not delay. The MTU is 32000 so that Python is fast enough. It needs
root and /dev/net/tun.
"""

import collections
import ctypes
import fcntl
import multiprocessing
import os
import selectors
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

MTU = 32000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_CLONE_NEWNET = 0x40000000
TICK_S = 0.05
RTO_MAX = "tcp_rto_max_ms"
"""For Linux 6.15 and later. Without it, a sender behind a broken link waits about as long as the break lasted."""


class Place(NamedTuple):
    """One end: its namespace and address; the hub has no link of its own."""

    name: str
    namespace: str
    address: str
    rtt_s: float = 0.0


class Pipe:
    """One direction of a link."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay = rate, delay_s
        self.limit_s = 4 * delay_s
        self.free, self.cut = 0.0, False
        self.carried = self.dropped = 0
        self.waiting: collections.deque[tuple[float, bytes]] = collections.deque()

    def put(self, packet: bytes, now: float) -> None:
        """Queue a packet; drop it when the queue is full."""
        start = max(now, self.free)
        if self.cut or start - now > self.limit_s:
            self.dropped += 1
            return
        self.free = start + len(packet) * 8 / self.rate
        self.waiting.append((self.free + self.delay, packet))


def _route(fds: dict[str, int], links: dict[str, tuple[Pipe, Pipe]], hub: str, orders: Connection) -> None:
    """The router's process. links: address to (towards the region, towards the hub). It ends when `orders` closes."""
    selector = selectors.DefaultSelector()
    by_ip = {socket.inet_aton(address): address for address in links}
    for address, fd in fds.items():
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ, address)
    selector.register(orders, selectors.EVENT_READ, None)
    pipes = [(pipe, fds[address] if down else fds[hub])
             for address, pair in links.items() for pipe, down in zip(pair, (True, False), strict=True)]  # fmt: skip
    history: list[tuple[float, dict[str, int]]] = []
    tick = 0.0
    while True:
        now = time.monotonic()
        if now >= tick:
            history.append((now, {address: pair[0].carried for address, pair in links.items()}))
            tick = now + TICK_S
        due = min((pipe.waiting[0][0] for pipe, _ in pipes if pipe.waiting), default=tick)
        for key, _ in selector.select(max(0.0, min(due, tick) - now)):
            if key.data is None:
                try:
                    order, address = orders.recv()
                except EOFError:
                    return
                if order == "history":
                    orders.send(history)
                else:
                    for pipe in links[address]:
                        pipe.cut = order == "cut"
                        if pipe.cut:
                            pipe.waiting.clear()
                continue
            now = time.monotonic()
            for _ in range(64):
                try:
                    packet = os.read(key.fd, MTU + 64)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4:
                    continue
                if key.data == hub:
                    target = by_ip.get(packet[16:20])
                    if target is not None:
                        links[target][0].put(packet, now)
                elif key.data in links:
                    links[key.data][1].put(packet, now)
        now = time.monotonic()
        for pipe, fd in pipes:
            while pipe.waiting and pipe.waiting[0][0] <= now:
                packet = pipe.waiting.popleft()[1]
                pipe.carried += len(packet)
                try:
                    os.write(fd, packet)
                except OSError:
                    pipe.dropped += 1


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, into a namespace. OSError."""
    with open(f"/run/netns/{namespace}") as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


class WideArea:
    """Places, their links, and the router between them."""

    def __init__(self, prefix: str, rtts: dict[str, float], rate_bits: float) -> None:
        """rtts: region to round trip in seconds."""
        self.rate = rate_bits
        self.hub = Place("hub", f"{prefix}-hub", "10.77.0.1")
        self.regions = {
            name: Place(name, f"{prefix}-{name}", f"10.77.0.{10 + at}", rtt)
            for at, (name, rtt) in enumerate(rtts.items())
        }
        self._orders: Connection | None = None
        self._router: multiprocessing.process.BaseProcess | None = None

    def places(self) -> list[Place]:
        """The hub, then the regions."""
        return [self.hub, *self.regions.values()]

    def _sh(self, *words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")

    def _open(self, at: int, place: Place) -> int:
        device = f"hrtun{os.getpid() % 100000}{at}"[:15]
        self._sh("ip", "netns", "add", place.namespace)
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        self._sh("ip", "link", "set", device, "netns", place.namespace)
        inside = ("ip", "netns", "exec", place.namespace)
        self._sh(*inside, "ip", "link", "set", "lo", "up")
        self._sh(*inside, "ip", "addr", "add", f"{place.address}/24", "dev", device)
        self._sh(*inside, "ip", "link", "set", device, "mtu", str(MTU), "txqueuelen", "4000", "up")
        settings = {"tcp_rmem": "4096 262144 67108864", "tcp_wmem": "4096 262144 67108864", RTO_MAX: "2000"}
        for key, value in settings.items():
            if os.path.exists(f"/proc/sys/net/ipv4/{key}"):
                self._sh(*inside, "sysctl", "-qw", f"net.ipv4.{key}={value}")
        return fd

    def start(self) -> None:
        """Make namespaces and router. OSError when this machine cannot."""
        if os.geteuid() or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
            raise OSError("network namespaces need root, iproute2 and /dev/net/tun")
        fds = {place.address: self._open(at, place) for at, place in enumerate(self.places())}
        links = {
            place.address: (Pipe(self.rate, place.rtt_s / 2), Pipe(self.rate, place.rtt_s / 2))
            for place in self.regions.values()
        }
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._router = context.Process(
            target=_router_main, args=(fds, links, self.hub.address, theirs, ours), daemon=True
        )
        self._router.start()
        theirs.close()
        self._orders = ours
        for fd in fds.values():
            os.close(fd)

    def cut(self, region: str) -> None:
        """Drop every packet on a region's link from now on."""
        self._tell("cut", region)

    def mend(self, region: str) -> None:
        """Let packets through again."""
        self._tell("mend", region)

    def _tell(self, order: str, region: str) -> None:
        assert self._orders is not None
        self._orders.send((order, self.regions[region].address))

    def carried(self) -> dict[str, list[tuple[float, int]]]:
        """Region to [(monotonic seconds, bytes carried towards it so far)], every `TICK_S`."""
        assert self._orders is not None
        self._orders.send(("history", ""))
        rows: list[tuple[float, dict[str, int]]] = self._orders.recv()
        return {name: [(at, row[place.address]) for at, row in rows] for name, place in self.regions.items()}

    def stop(self) -> None:
        """End the router and remove the namespaces."""
        if self._orders is not None:
            self._orders.close()
        if self._router is not None:
            self._router.join(5)
            if self._router.is_alive():
                self._router.kill()
        for place in self.places():
            subprocess.run(["ip", "netns", "del", place.namespace], capture_output=True, check=False)


def _router_main(
    fds: dict[str, int], links: dict[str, tuple[Pipe, Pipe]], hub: str, orders: Connection, other: Connection
) -> None:
    other.close()  # otherwise the child's copy keeps the pipe open when the parent ends
    os.nice(-10)  # a link's delay does not depend on this machine's load
    _route(fds, links, hub, orders)


@contextmanager
def wide_area(prefix: str, rtts: dict[str, float], rate_bits: float) -> Iterator[WideArea]:
    """A running wide area, removed at the end."""
    area = WideArea(prefix, rtts, rate_bits)
    try:
        area.start()
        yield area
    finally:
        area.stop()


def ping(area: WideArea, region: str) -> float:
    """Round trip in seconds as a TCP handshake from this namespace to a region's closed port measures it."""
    since = time.monotonic()
    with socket.socket() as probe:
        probe.settimeout(5)
        probe.connect_ex((area.regions[region].address, 9))
    return time.monotonic() - since
