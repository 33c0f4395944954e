"""A cluster of three brokers: every stream is on three disks, and the loss of any one broker loses nothing that was
acknowledged.

The idea: JetStream keeps R3 streams by Raft, a publish is acknowledged when two of three have it, and actors reconnect
to a remaining broker (the first broker that they reach names the others). An election takes 4 to 9 s; `Bus.publish`
tries again for 20, with the same message id, so a publish that was stored but not acknowledged is not stored twice.

Trade-off: an acknowledged message is in the memory of two kernels; `sync_interval` in cluster.conf bounds the loss when
two sites lose power at once. Place the three brokers on separate power supplies. Method: Raft (Ongaro, Ousterhout 2014)
as nats-server has it; limits found by others: Jepsen's report on NATS 2.12.1 (2025-12-08).

    python -m headrace.bus.broker.cluster FOLDER a=10.0.0.1:6222 b=10.0.0.2:6222 c=10.0.0.3:6222   # one folder per node
    python -m headrace.bus.broker.cluster --declare FOLDER/a --url nats://10.0.0.1:4222             # R3 streams, once
"""

import argparse
import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

from headrace.bus.broker import credentials
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare

REPLICAS = 3
CONF = Path(__file__).with_name("cluster.conf")
"""deploy/cluster; in an installed package a copy of it."""


def prepare(folder: Path, routes: Mapping[str, str]) -> dict[str, Path]:
    """Make ``FOLDER/<name>`` for each broker: configuration, and the same credentials for all. Name to its folder.

    routes: name to ``host:port``, where that broker listens for the others. BusError unless there are three. A repeat
    keeps the keys and makes a new secret for the routes of all brokers.
    """
    if len(routes) != REPLICAS or any(not address.rpartition(":")[2].isdigit() for address in routes.values()):
        raise BusError(f"expected {REPLICAS} brokers, each as name=host:port, got {dict(routes)}")
    secret = token_hex(24)
    urls = ", ".join(f'"nats-route://headrace:{secret}@{address}"' for address in routes.values())
    first = credentials.write(folder / next(iter(routes)) / "credentials")
    out = {}
    for name, address in routes.items():
        broker_folder = out[name] = folder / name
        if broker_folder / "credentials" != first:
            shutil.copytree(first, broker_folder / "credentials", dirs_exist_ok=True)
        host, _, port = address.rpartition(":")
        text = f'NAME: "{name}"\nROUTE_HOST: "{host}"\nROUTE_PORT: {port}\nROUTE_SECRET: "{secret}"\nROUTES: [{urls}]\n'
        credentials.private(broker_folder / "self.conf", text)
        (broker_folder / "nats.conf").write_bytes(CONF.read_bytes())
    return out


async def declare_replicated(bus: Bus, *, reserve: bool = True) -> None:
    """Declare all streams and buckets, each on three disks; needs the role admin. BusError.

    Call it after the brokers have elected a leader: they never answer an earlier request.
    """
    await bus.connection.patiently(lambda: bus.connection.api("INFO", timeout=1.0), budget=30.0)
    await declare(bus, reserve=reserve, replicas=REPLICAS)


def main() -> None:
    """Prepare folders, or declare the streams."""
    parser = argparse.ArgumentParser(prog="python -m headrace.bus.broker.cluster", description="three brokers as one")
    parser.add_argument("folder", type=Path)
    parser.add_argument("routes", nargs="*", metavar="NAME=HOST:PORT")
    parser.add_argument("--declare", action="store_true", help="declare the streams through a running broker")
    parser.add_argument("--url", default="", help="that broker")
    args = parser.parse_args()
    try:
        if args.declare:
            asyncio.run(_declare(args.url, args.folder / "credentials"))
        else:
            prepare(args.folder, dict(route.split("=", 1) if "=" in route else (route, "") for route in args.routes))
    except BusError as error:
        parser.exit(4, f"{error}\n")


async def _declare(url: str, keys: Path) -> None:
    async with await Bus.connect(url, role="admin", credentials=keys) as bus:
        await declare_replicated(bus)


if __name__ == "__main__":
    main()
