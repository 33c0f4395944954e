"""`headrace purge`: delete a user's data everywhere, keep the user out of later training, write the certificate."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

ANSWER_S = 60.0


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "purge", help="delete a user's data everywhere, deny the user's later training, write a signed certificate"
    )
    add_run(parser, optional=False)
    parser.add_argument("user", help="the user's name, as the client sends it; or the hash, with --hash")
    parser.add_argument("--tenant", default="", help="the user's tenant; without it that of [production]")
    parser.add_argument("--hash", action="store_true", help="USER is the hash that names the user on the bus")
    parser.add_argument("--output", default="", help="file for the certificate (default: purge-<hash>.json)")
    parser.set_defaults(handler=purge)


def purge(args: argparse.Namespace) -> int:
    """Request the purge from the run's feedback actor, and write its certificate."""
    import msgspec

    from headrace.bus.errors import BusError
    from headrace.config import Config, load
    from headrace.gateway.user_keys import UserKeys
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped
    from headrace.messages.operations import Ack
    from headrace.messages.product import PurgeCertificate, PurgeUser
    from headrace.messages.subjects import RPC

    async def body() -> int:
        folder = runs.find(args.run)
        config = load(folder.config) if folder.config.is_file() else Config()
        user = args.user
        if not args.hash:
            key = folder.path / "user.key"
            if not key.is_file():
                raise RunError(f"{key} does not exist: run this where the gateway runs, or give the hash with --hash")
            user = UserKeys(key).hash(args.tenant or config.production.tenant, args.user)
        async with bus_of(folder) as bus:
            try:
                subject = RPC.at(service="feedback", method="purge")
                answer = await bus.request(subject, PurgeUser(user=user), timeout=ANSWER_S)
            except BusError as error:
                raise RunError(f"the feedback actor of run {folder.id} did not answer: {error}", 1) from None
        if not isinstance(answer, PurgeCertificate):
            detail = answer.detail if isinstance(answer, Ack) else f"unexpected answer {answer.type_name}"
            raise RunError(f"the user was not purged: {detail}", 1)
        path = Path(args.output or f"purge-{user}.json")
        path.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
        say(f"{answer.detail}; the certificate is in {path}")
        return 0

    return looped(body())
