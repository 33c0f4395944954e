"""`headrace purge` and `headrace readmit`: delete a user's data and deny later training; allow it again."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.launch.runs import RunDir
    from headrace.messages.base import Message

ANSWER_S = 60.0


def add(commands: "Commands") -> None:
    """Declare the commands."""
    parser = commands.add_parser(
        "purge", help="delete a user's data everywhere, deny the user's later training, write a signed certificate"
    )
    _add_user(parser)
    parser.add_argument("--output", default="", help="file for the certificate (default: purge-<hash>.json)")
    parser.set_defaults(handler=purge)
    parser = commands.add_parser("readmit", help="take a purged user off the deny-list")
    _add_user(parser)
    parser.set_defaults(handler=readmit)


def _add_user(parser: argparse.ArgumentParser) -> None:
    add_run(parser, optional=False)
    parser.add_argument("user", help="the user's name, as the client sends it; or the hash, with --hash")
    parser.add_argument("--tenant", default="", help="the user's tenant; without it that of [production]")
    parser.add_argument("--hash", action="store_true", help="USER is the hash that names the user on the bus")


def purge(args: argparse.Namespace) -> int:
    """Request the purge from the run's feedback actor, and write its certificate."""
    import msgspec

    from headrace.launch import runs
    from headrace.launch.session import looped
    from headrace.messages.product import PurgeCertificate, PurgeUser

    async def body() -> int:
        folder = runs.find(args.run)
        user = _hash(folder, args)
        answer = await _ask(folder, PurgeUser(user=user))
        if not isinstance(answer, PurgeCertificate):
            raise RunError(f"the user was not purged: {_detail(answer)}", 1)
        path = Path(args.output or f"purge-{user}.json")
        path.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
        say(f"{answer.detail}; the certificate is in {path}")
        return 0

    return looped(body())


def readmit(args: argparse.Namespace) -> int:
    """Request from the run's feedback actor that a user is trained on again."""
    from headrace.launch import runs
    from headrace.launch.session import looped
    from headrace.messages.operations import Ack
    from headrace.messages.product import ReadmitUser

    async def body() -> int:
        folder = runs.find(args.run)
        answer = await _ask(folder, ReadmitUser(user=_hash(folder, args)))
        if not isinstance(answer, Ack) or not answer.ok:
            raise RunError(f"the user was not readmitted: {_detail(answer)}", 1)
        say(answer.detail)
        return 0

    return looped(body())


def _hash(folder: "RunDir", args: argparse.Namespace) -> str:
    """The hash that names the user on the bus. RunError where the gateway's key is not here."""
    from headrace.config import Config, load
    from headrace.gateway.user_keys import UserKeys

    if args.hash:
        return str(args.user)
    config = load(folder.config) if folder.config.is_file() else Config()
    key = folder.path / "user.key"
    if not key.is_file():
        raise RunError(f"{key} does not exist: run this where the gateway runs, or give the hash with --hash")
    return UserKeys(key).hash(args.tenant or config.production.tenant, args.user)


async def _ask(folder: "RunDir", message: "Message") -> "Message":
    """The answer of the run's feedback actor. RunError where it gives none."""
    from headrace.bus.errors import BusError
    from headrace.launch.session import bus_of
    from headrace.messages.subjects import RPC

    async with bus_of(folder) as bus:
        try:
            return await bus.request(
                RPC.at(service="feedback", caller=bus.role, method="purge"), message, timeout=ANSWER_S
            )
        except BusError as error:
            raise RunError(f"the feedback actor of run {folder.id} did not answer: {error}", 1) from None


def _detail(answer: "Message") -> str:
    from headrace.messages.operations import Ack

    return answer.detail if isinstance(answer, Ack) else f"unexpected answer {answer.type_name}"
