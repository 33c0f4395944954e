"""`headrace bus declare`: create or update all streams and buckets on a broker that an operator runs.

`headrace up` does this by itself. A broker that an operator starts needs it once, before the first actor, and again
after an upgrade. Running it twice changes nothing.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("declare", help="create or update all streams and buckets on a running broker")
    parser.add_argument("--config", default="", metavar="TOML", help="configuration with [bus] url and credentials")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help="address of the broker; default: [bus] url of the configuration")
    parser.add_argument("--credentials", default="", help="folder with admin.nk; default: [bus] credentials")
    parser.add_argument("--run", default="", help="only the account of this run; default: every account")
    parser.add_argument("--replicas", type=integer(1), default=1, help="copies of every stream: 3 in a cluster")
    parser.add_argument("--reserve", action="store_true", help="reserve the streams' full size on the broker's disk")
    parser.set_defaults(handler=declare)


def declare(args: argparse.Namespace) -> int:
    """Connect as admin and declare everything; 4 when the broker refuses or cannot be reached."""
    import uvloop

    from headrace.bus.broker import permissions
    from headrace.bus.broker.credentials import accounts, of_run
    from headrace.bus.connection import Bus
    from headrace.bus.errors import BusError
    from headrace.bus.nats import streams
    from headrace.launch.admission import own
    from headrace.launch.output import say

    config = own(args.config, args.set)
    url, credentials = args.url or config.bus.url, args.credentials or config.bus.credentials
    if not url:
        raise BusError("expected a broker: --url nats://host:port, or [bus] url in --config")

    runs = [args.run] if args.run else accounts(Path(credentials)) if Path(credentials or ".none").is_dir() else []
    folders = [of_run(credentials, run) for run in runs] or [credentials]

    async def body() -> None:
        for keys in folders:
            async with await Bus.connect(url, role="admin", credentials=keys or None) as bus:
                await streams.declare(bus, reserve=args.reserve, replicas=args.replicas, sizes=config.bus.stream_bytes)

    uvloop.run(body())
    many = f" in each of {len(folders)} accounts" if len(folders) > 1 else ""
    say(f"{url} has all {len(permissions.NAMES)} streams and buckets{many}")
    return 0
