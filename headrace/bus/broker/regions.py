"""A hub and its regions: one broker where the trainer is, one in every region, joined as leaf nodes.

The idea: a region's broker has the same accounts of roles, and of streams the one of HR_WEIGHTS alone, with a mirror in
it. The account of each role that may live in a region is linked with the same role's account at the hub, and mappings
forward every request about another stream to the hub's JetStream domain. Actors in a region connect to that broker and
use the same subjects as everywhere. So a version crosses the long link once per region, a receiver cannot read past its
mirror, and no actor knows that there are regions. Calls between actors of one region stay in it.

Trade-off: the broker checks permissions after mapping, so a region has user lists of its own, made here from the same
table. At the hub each link is a user of its role's account with a key of its own, which may do what the role may,
without publishing, reading or purging weights; the link of the mirror may read weights.

A region holds no users' data: only weights are mirrored, and a purge of a user's data at the hub is complete. Mirrors
keep sequences, so manifests name chunks everywhere alike. They do not follow purges of their origin: collect in a
region by running `headrace weights log --collect` against its broker. Method: NATS leaf nodes with JetStream domains,
and mirrors across domains (ADR-59). Delays of nats-server 2.15, on loopback: after a restart of the hub mirrors go on
within 10 s; a region's broker that starts while its link is down has its mirror some 40 s after the link.

    python -m headrace.bus.broker.regions hub FOLDER [--host 0.0.0.0] [--port 7422]
    python -m headrace.bus.broker.regions region FOLDER --name eu --hub nats-leaf://hub.example:7422 --links HUB/links
    python -m headrace.bus.broker.regions mirror FOLDER --url nats://127.0.0.1:4222
"""

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.bus.broker import accounts, credentials, permissions, tls
from headrace.bus.broker.accounts import Import
from headrace.bus.broker.keys import Key
from headrace.bus.broker.permissions import NAMES, REGIONAL, ROLES, Permissions
from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError
from headrace.bus.nats.streams import config_of
from headrace.messages.subjects import STREAM, stream_of

HUB = "hub"
"""JetStream domain of the hub."""
NEAR = ("HR_WEIGHTS",)
"""Streams of which a region has a mirror."""
FAR = tuple(name for name in NAMES if name not in NEAR)
"""Streams that a region's broker forwards to the hub."""
HUB_CONF = Path(__file__).with_name("hub.conf")
REGION_CONF = Path(__file__).with_name("region.conf")
"""deploy/regions; in an installed package copies of them."""

LINKS = "links"
"""Folder of a hub with the seeds of the links, which a region needs."""
_HUB_API = "hr.hub"
"""Prefix of requests by the account of HR_WEIGHTS in a region to the hub's JetStream."""
_RPC = "hr.rpc."
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


def _near(subject: str) -> bool:
    return any(name in subject.split(".") for name in NEAR) or subject == permissions.INFO


def _captured_near(subject: str) -> bool:
    stream = stream_of(subject)
    return stream is not None and stream.name in NEAR


def near_permissions(role: str) -> Permissions:
    """A role's permissions in a region: the usual ones, with the subjects that the region's broker sees."""
    base = permissions.of(role)
    publish = tuple(far(subject) for subject in base.publish)
    if role == "admin":
        publish += tuple(f"{_HUB_API}.STREAM.INFO.{stream}" for stream in NEAR)
    return Permissions(publish=publish, subscribe=base.subscribe, connections=base.connections)


def link_permissions(role: str) -> Permissions:
    """The permissions of the link of a role in the role's account at the hub. It has no part in weights, and of calls
    it carries those that the role answers: a region's callers reach the others within their region."""
    base = permissions.of(role)
    publish = [far(name) for name in base.publish if not (_near(name) or _captured_near(name) or name.startswith(_RPC))]
    answers = (f"{_RPC}{role}.>", permissions.ANSWERS)
    return Permissions(
        publish=tuple(dict.fromkeys([*publish, *answers])), subscribe=tuple(dict.fromkeys([*base.subscribe, *answers]))
    )


MIRROR = Permissions(
    publish=(
        *(f"{_HUB_API}.{verb}" for verb in ("STREAM.INFO.HR_WEIGHTS", "CONSUMER.CREATE.HR_WEIGHTS")),
        *(f"{_HUB_API}.CONSUMER.{verb}.HR_WEIGHTS.>" for verb in ("CREATE", "DELETE")),
        "$JS.FC.HR_WEIGHTS.>",
    ),
    subscribe=("hr.mirror.>", "_INBOX.>", "_R_.>", "$JSC.R.>"),
)
"""The permissions of the link of a region's mirror at the hub."""


def hub_conf(public_keys: dict[str, str], links: dict[str, str]) -> str:
    """The ``accounts`` block of a hub. links: regional role, or HR_WEIGHTS, to public key."""
    lines = ["# Made by headrace: one account per stream and role, one user per role, public keys only.", "accounts {"]
    for stream in NAMES:
        lines += accounts.of_stream(stream)
    for role, public in public_keys.items():
        users = accounts.user(role, public, permissions.of(role))
        if role in links:
            users += accounts.user(f"link of {role}", links[role], link_permissions(role))
        lines += accounts.of_role(role, users, accounts.imports(role))
    lines += ['  "mirrors" {', "    users: [", *accounts.user("link of mirrors", links["HR_WEIGHTS"], MIRROR), "    ]"]
    lines.append("    imports: [")
    for subject in MIRROR.publish:
        home = subject.replace(_HUB_API, "$JS.API", 1)
        lines.append(
            f'      {{ service: {{ account: "HR_WEIGHTS", subject: "{home}" }}, to: "{subject}", share: true }}'
        )
    lines += ['      { stream: { account: "HR_WEIGHTS", subject: "hr.mirror.>" } }', "    ]", "  }"]
    return "\n".join([*lines, "}", ""])


def region_conf(public_keys: dict[str, str]) -> str:
    """The ``accounts`` block of a region's broker."""
    lines = ["# Made by headrace: one account per role and one of HR_WEIGHTS, public keys only.", "accounts {"]
    for stream in NEAR:
        lines += accounts.of_stream(stream, extra=[f"{_HUB_API}.STREAM.INFO.{stream}"])
    for role, public in public_keys.items():
        wanted = [each for each in accounts.imports(role) if each.account in ROLES or _near(each.subject)]
        if role == "admin":
            wanted += [Import("service", stream, f"{_HUB_API}.STREAM.INFO.{stream}") for stream in NEAR]
        users = accounts.user(role, public, near_permissions(role))
        pairs = {name: far(name) for name in permissions.of(role).publish if far(name) != name}
        lines += accounts.of_role(role, users, wanted, mappings=pairs if role in REGIONAL else {})
    return "\n".join([*lines, "}", ""])


def links_conf(hub: str, seeds: dict[str, str]) -> str:
    """The ``remotes`` of a region's broker. seeds: regional role, or HR_WEIGHTS, to the link's seed."""
    lines = ["remotes: ["]
    for account, seed in seeds.items():
        lines += [f'  {{ url: "{hub}", account: "{account}", nkey: "{seed}"', *_LINK, "  }"]
    return "\n".join([*lines, "]", ""])


_LINK = (
    "    # On a busy link the hub's INFO can take longer than the default of 1 s.",
    '    first_info_timeout: "10s"',
    "    # The default compresses hardest where the round trip is longest: some MB/s of text, so requests time out.",
    "    compression: s2_fast",
    "    # The hub's authority, where credentials/ has ca.pem (headrace/bus/broker/tls.py).",
    '    include "hub_tls.conf"',
)


def mirror_config(*, reserve: bool = False) -> dict[str, Any]:
    """The broker's configuration of a region's HR_WEIGHTS."""
    config = config_of(STREAM["HR_WEIGHTS"], reserve=reserve, replicas=1)
    del config["subjects"], config["duplicate_window"]
    # A full mirror drops its oldest versions: the hub has them, and a joiner starts at the newest full snapshot.
    origin = {"name": "HR_WEIGHTS", "external": {"api": _HUB_API, "deliver": "hr.mirror"}}
    config |= {"discard": "old", "mirror": origin}
    return config


async def declare_mirror(bus: Bus, *, reserve: bool = False) -> None:
    """Make the mirror on a region's broker; needs its admin. BusError when the hub cannot be reached, or when
    HR_WEIGHTS exists and is not a mirror.

    This waits for an answer of the hub first, because a mirror that is made before its link is up tries again only
    after half a minute.
    """
    taken = BusError("this broker has another HR_WEIGHTS, expected none: start it on an empty store")
    try:
        here = msgspec.json.decode(await bus.connection.api("STREAM.INFO.HR_WEIGHTS"))
        if "mirror" not in here["config"]:
            raise taken
    except ApiError:
        pass  # there is none
    origin = f"{_HUB_API}.STREAM.INFO.HR_WEIGHTS"
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
        raise taken from None


def prepare_hub(folder: Path, *, host: str = "0.0.0.0", port: int = 7422) -> Path:
    """Make the folder of a hub's broker: configuration, credentials, and the address for regions. Returns the
    folder."""
    keys = credentials.write(folder / "credentials")
    links = credentials.seeds(folder / LINKS, (*REGIONAL, *NEAR))
    credentials.private(keys / "users.conf", hub_conf(credentials.seeds(keys, ROLES), links) + tls.server_conf(keys))
    for name in (credentials.WRITERS, f"{credentials.PUBLISHER}.pub"):
        credentials.private(folder / LINKS / name, (keys / name).read_text(encoding="ascii"))
    (folder / "leaf_tls.conf").write_text(tls.server_conf(keys))
    (folder / "nats.conf").write_bytes(HUB_CONF.read_bytes())
    (folder / "self.conf").write_text(f'LEAF_HOST: "{host}"\nLEAF_PORT: {port}\n')
    return folder


def prepare_region(folder: Path, name: str, hub: str, links: str | Path) -> Path:
    """Make the folder of a region's broker; returns the folder.

    name: the region and its JetStream domain. hub: address such as nats-leaf://hub.example:7422. links: the hub's
    folder ``links``, with the seeds of the links. BusError for an unusable name or folder.
    """
    if not _NAME.match(name) or name == HUB:
        raise BusError(f"expected a region name of lower-case letters, digits and '-', not {HUB!r}, got {name!r}")
    try:
        opened = {
            account: Key.parse((Path(links) / f"{account}.nk").read_text(encoding="ascii")).seed
            for account in (*REGIONAL, *NEAR)
        }
    except (OSError, ValueError):
        raise BusError(f"{links} does not hold the seeds of the hub's links: copy the hub's folder 'links'") from None
    keys = credentials.write(folder / "credentials", writers=REGIONAL)
    credentials.adopt_publisher(keys, Path(links))
    credentials.trust(keys, Path(links) / credentials.WRITERS)
    public = credentials.seeds(keys, ROLES)
    credentials.private(keys / "users.conf", region_conf(public) + tls.server_conf(keys))
    (folder / "hub_tls.conf").write_text(tls.link_conf(keys))
    credentials.private(folder / "self.conf", f'REGION: "{name}"\n')
    credentials.private(folder / "links.conf", links_conf(hub, opened))
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
    region.add_argument("--links", required=True, help="the hub's folder links")
    mirror = commands.add_parser("mirror", help="declare HR_WEIGHTS on a running region's broker")
    mirror.add_argument("folder", type=Path)
    mirror.add_argument("--url", required=True)
    args = parser.parse_args()
    try:
        if args.command == "hub":
            prepare_hub(args.folder, host=args.host, port=args.port)
        elif args.command == "region":
            prepare_region(args.folder, args.name, args.hub, args.links)
        else:
            asyncio.run(_mirror(args.url, args.folder / "credentials"))
    except BusError as error:
        parser.exit(4, f"{error}\n")


async def _mirror(url: str, keys: Path) -> None:
    async with await Bus.connect(url, role="admin", credentials=keys) as bus:
        await declare_mirror(bus)


if __name__ == "__main__":
    main()
