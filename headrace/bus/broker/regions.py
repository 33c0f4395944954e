"""A hub and its regions: one broker where the trainer is, one in every region, joined as leaf nodes.

The idea: a region's broker has a mirror of HR_WEIGHTS, and account mappings forward every request about another stream
to the hub's JetStream domain. Actors in a region connect to that broker and use the same subjects as everywhere. So a
version crosses the long link once per region, a receiver cannot read past its mirror, and no actor knows that there are
regions.

Trade-off: the broker checks permissions after mapping, so a region has user lists of its own, made here from the same
table. The hub's user list (role ``region``) fences the link itself: the union of the permissions of actors in regions,
without publishing or purging weights.

A region holds no users' data: only weights are mirrored, and a purge of a user's data at the hub is complete. Mirrors
keep sequences, so manifests name chunks everywhere alike. They do not follow purges of their origin: collect in a
region by running `headrace weights collect` against its broker. Method: NATS leaf nodes with JetStream domains, and
mirrors across domains (ADR-59). Delays of nats-server 2.15, measured on loopback: after a restart of the hub mirrors go
on within 10 s; a region's broker that starts while its link is down has its mirror some 40 s after the link.

    python -m headrace.bus.broker.regions hub FOLDER [--host 0.0.0.0] [--port 7422]
    python -m headrace.bus.broker.regions region FOLDER --name eu --hub nats-leaf://hub.example:7422 --key HUB/region.nk
    python -m headrace.bus.broker.regions mirror FOLDER --url nats://127.0.0.1:4222
"""

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

from headrace.bus.broker import credentials, tls
from headrace.bus.broker.keys import Key
from headrace.bus.broker.permissions import LINK_ROLE, REGIONAL, ROLES, Permissions, of, users_conf
from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError
from headrace.bus.nats.streams import config_of
from headrace.messages.subjects import KEY_VALUES, STREAM, STREAMS

HUB = "hub"
"""JetStream domain of the hub."""
NEAR = ("HR_WEIGHTS",)
"""Streams of which a region has a mirror."""
FAR = (*(stream.name for stream in STREAMS if stream.name not in NEAR), *(f"KV_{name}" for name in KEY_VALUES))
"""Streams that a region's broker forwards to the hub."""
HUB_CONF = Path(__file__).with_name("hub.conf")
REGION_CONF = Path(__file__).with_name("region.conf")
"""deploy/regions; in an installed package copies of them."""

_VERBS = (
    *("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "STREAM.MSG.DELETE.{}", "STREAM.PURGE.{}", "STREAM.CREATE.{}"),
    *("STREAM.UPDATE.{}", "STREAM.DELETE.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>", "CONSUMER.CREATE.{}.>"),
    *("CONSUMER.INFO.{}.*", "CONSUMER.DELETE.{}.*", "CONSUMER.MSG.NEXT.{}.*"),
)
LINK_S = 60.0
"""Time limit for the leaf link to connect."""
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,31}$")
_EXISTS = 10058


def far(subject: str) -> str:
    """A subject after a region's mappings: API requests about streams of the hub and key-value writes go to the hub,
    every other subject is unchanged."""
    if subject.startswith("$KV."):
        return f"$JS.{HUB}.API.{subject}"
    if subject.startswith("$JS.API.") and any(name in subject.split(".") for name in FAR):
        return subject.replace("$JS.API.", f"$JS.{HUB}.API.", 1)
    return subject


def mappings() -> str:
    """The ``mappings`` block of a region's broker."""
    pairs = {"$KV.>": f"$JS.{HUB}.API.$KV.>"}
    for name in FAR:
        for verb in _VERBS:
            subject = f"$JS.API.{verb.format(name)}"
            pairs[subject] = far(subject).replace("*", "$1")
    lines = [f'  "{source}": "{target}"' for source, target in pairs.items()]
    return "\n".join(["# Made by headrace: requests about streams that lie in the hub.", "mappings {", *lines, "}", ""])


def near_permissions(role: str) -> Permissions:
    """A role's permissions in a region: the usual ones, with the subjects that the region's broker sees."""
    base = of(role)
    publish = [far(subject) for subject in base.publish]
    if "$JS.API.STREAM.INFO.*" in publish:
        publish.append(f"$JS.{HUB}.API.STREAM.INFO.*")
    return Permissions(publish=tuple(publish), subscribe=base.subscribe, allow_responses=base.allow_responses)


def mirror_config(*, reserve: bool = False) -> dict[str, Any]:
    """The broker's configuration of a region's HR_WEIGHTS."""
    config = config_of(STREAM["HR_WEIGHTS"], reserve=reserve, replicas=1)
    del config["subjects"], config["duplicate_window"]
    # A full mirror drops its oldest versions: the hub has them, and a joiner starts at the newest full snapshot.
    config |= {"discard": "old", "mirror": {"name": "HR_WEIGHTS", "external": {"api": f"$JS.{HUB}.API"}}}
    return config


async def declare_mirror(bus: Bus, *, reserve: bool = False) -> None:
    """Make the mirror on a region's broker; needs its admin. BusError when the hub cannot be reached, or when
    HR_WEIGHTS exists and is not a mirror.

    This waits for an answer of the hub first, because a mirror that is made before its link is up tries again only
    after half a minute.
    """
    origin = f"$JS.{HUB}.API.STREAM.INFO.HR_WEIGHTS"
    try:
        await bus.connection.patiently(lambda: bus.connection.call(origin, timeout=2.0), LINK_S)
    except BusError as error:
        raise BusError(
            f"the hub does not answer over the leaf link; see the log of the region's broker ({error})"
        ) from None
    try:
        await bus.connection.api("STREAM.CREATE.HR_WEIGHTS", mirror_config(reserve=reserve), timeout=30.0)
    except ApiError as error:
        if error.err_code != _EXISTS:
            raise BusError(f"HR_WEIGHTS cannot be mirrored here: {error}") from error
        raise BusError("this broker has another HR_WEIGHTS, expected none: start it on an empty store") from None


def prepare_hub(folder: Path, *, host: str = "0.0.0.0", port: int = 7422) -> Path:
    """Make the folder of a hub's broker: configuration, credentials, and the address for regions. Returns the
    folder."""
    keys = credentials.write(folder / "credentials")
    (folder / "leaf_tls.conf").write_text(tls.server_conf(keys))
    (folder / "nats.conf").write_bytes(HUB_CONF.read_bytes())
    (folder / "self.conf").write_text(f'LEAF_HOST: "{host}"\nLEAF_PORT: {port}\n')
    return folder


def prepare_region(folder: Path, name: str, hub: str, key: str | Path) -> Path:
    """Make the folder of a region's broker; returns the folder.

    name: the region and its JetStream domain. hub: address such as nats-leaf://hub.example:7422. key: the hub's seed
    file of the role ``region``. BusError for an unusable name or key.
    """
    if not _NAME.match(name) or name == HUB:
        raise BusError(f"expected a region name of lower-case letters, digits and '-', not {HUB!r}, got {name!r}")
    try:
        seed = Key.parse(Path(key).read_text(encoding="ascii")).seed
    except (OSError, ValueError):
        raise BusError(f"{key} does not hold the seed of the hub's role 'region'") from None
    seeds = credentials.write(folder / "credentials", writers=REGIONAL)
    credentials.adopt_publisher(seeds, Path(key).parent)
    hub_writers = Path(key).parent / credentials.WRITERS
    if hub_writers.exists():
        credentials.trust(seeds, hub_writers)
    public = {role: Key.parse((seeds / f"{role}.nk").read_text(encoding="ascii")).public for role in ROLES}
    del public[LINK_ROLE]
    credentials.private(seeds / "region.conf", users_conf(public, near_permissions) + tls.server_conf(seeds))
    (folder / "hub_tls.conf").write_text(tls.link_conf(seeds))
    credentials.private(folder / "self.conf", f'REGION: "{name}"\nHUB: "{hub}"\nHUB_SEED: "{seed}"\n')
    (folder / "mappings.conf").write_text(mappings())
    (folder / "nats.conf").write_bytes(REGION_CONF.read_bytes())
    return folder


def main() -> None:
    """Prepare a broker's folder, or declare a region's mirror."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.bus.broker.regions", description="brokers of hub and regions"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    hub = commands.add_parser("hub", help="prepare the hub's folder")
    hub.add_argument("folder", type=Path)
    hub.add_argument("--host", default="0.0.0.0", help="where regions knock")
    hub.add_argument("--port", type=int, default=7422)
    region = commands.add_parser("region", help="prepare a region's folder")
    region.add_argument("folder", type=Path)
    region.add_argument("--name", required=True)
    region.add_argument("--hub", required=True, help="nats-leaf://host:7422")
    region.add_argument("--key", required=True, help="the hub's credentials/region.nk")
    mirror = commands.add_parser("mirror", help="declare HR_WEIGHTS on a running region's broker")
    mirror.add_argument("folder", type=Path)
    mirror.add_argument("--url", required=True)
    args = parser.parse_args()
    try:
        if args.command == "hub":
            prepare_hub(args.folder, host=args.host, port=args.port)
        elif args.command == "region":
            prepare_region(args.folder, args.name, args.hub, args.key)
        else:
            asyncio.run(_mirror(args.url, args.folder / "credentials"))
    except BusError as error:
        parser.exit(4, f"{error}\n")


async def _mirror(url: str, keys: Path) -> None:
    async with await Bus.connect(url, role="admin", credentials=keys) as bus:
        await declare_mirror(bus)


if __name__ == "__main__":
    main()
