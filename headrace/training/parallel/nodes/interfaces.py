"""Keeps gloo and NCCL on one network interface: their connections cannot authenticate.

By themselves gloo listens where the machine's name resolves to, and NCCL at the first interface that is not loopback.
Here both get the interface over which this process reaches the group's store: loopback where all ranks are on one
machine, otherwise that of `[trainer] rendezvous`, which belongs to a private network.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_own: dict[str, str] = {}
"""Variables that this process has set, to their values."""


def pin(host: str) -> None:
    """Use the interface that leads to a host, unless an operator's variables name another. OSError when there is
    none."""
    interface = leading_to(host)
    for name in _NAMES:
        if os.environ.get(name) == _own.get(name):
            os.environ[name] = _own[name] = interface


def leading_to(host: str) -> str:
    """The name of the interface over which this machine reaches a host. OSError."""
    family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        address = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    if address.is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    raise OSError(f"no network interface has the address {address}, over which {host} is reached")


def _addresses(name: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The first IPv4 address of an interface, and all of IPv6."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):  # it has none
        asked = struct.pack("256s", name.encode()[:15])
        found.add(ipaddress.IPv4Address(fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, interface = line.split()
            if interface == name:
                found.add(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found
