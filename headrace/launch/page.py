"""The live page of a run: started by `headrace up`, and by `headrace dashboard` for any run."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.bus.broker.credentials import private
from headrace.bus.broker.permissions import WEB_ROLE
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.dashboard.live.access import Access
    from headrace.dashboard.live.server import Address, LivePage
    from headrace.messages.tasks import TaskRef


NO_PAGE = "no live page: [bus] url names a broker, and [dashboard] websocket does not say where its WebSocket is"
"""The message of `up` when a page needs a setting of the operator's broker."""


class OpenPage(msgspec.Struct):
    """<run dir>/<id>/page.json, mode 0600: where a live run's page is."""

    page: str
    key: str
    secret: str
    """Signs the page's tokens, which show users' sessions too."""
    token: str = ""
    """One of them, of a page that was started with `--users`."""

    def users(self, minutes: int) -> str:
        """The address that also shows users' sessions, for a number of minutes from now."""
        from headrace.dashboard.live.access import Access

        return opened(self.page, Access(secret=self.secret).token(60.0 * minutes))


def opened(page: str, key: str) -> str:
    """The address of a page with its key in the fragment, which browsers send to nobody."""
    return f"{page}#key={key}"


def write_place(folder: Path, page: str, access: "Access", token: str = "") -> None:
    """Write the page's address; key, secret and token are for this machine's operator alone."""
    folder.mkdir(parents=True, exist_ok=True)
    private(folder / "page.json", msgspec.json.encode(OpenPage(page, access.key, access.secret, token)).decode())


def read_place(folder: Path) -> OpenPage | None:
    """The address of a run's page; None when it has none."""
    path = folder / "page.json"
    return msgspec.json.decode(path.read_bytes(), type=OpenPage) if path.is_file() else None


def address_of(config: Config) -> "Address | None":
    """The page's listening socket, taken before the broker starts; None when the run has no page (`NO_PAGE`, or
    [dashboard] turns it off)."""
    from headrace.dashboard.live.server import Address

    if not config.dashboard.enabled:
        return None
    if config.bus.url and not config.dashboard.websocket:
        return None
    return Address(config.dashboard.host, config.dashboard.port)


def websocket_of(config: Config, started: str) -> str:
    """The broker's ws:// address. RunError when the operator's own broker has none configured."""
    named = config.dashboard.websocket
    if named:
        return named.replace("http", "ws", 1)
    if not started:
        raise RunError(
            "the page needs the broker's WebSocket: set [dashboard] websocket to its http:// address, and list the "
            "page's origin in `websocket { allowed_origins }` of the broker's configuration"
        )
    return started


@asynccontextmanager
async def serving(
    config: Config, run: str, bus: "Bus", address: "Address", websocket: str, credentials: str
) -> AsyncIterator["LivePage"]:
    """Serve the page while the block runs."""
    from headrace.dashboard.live.server import LivePage

    seed = Path(credentials) / f"{WEB_ROLE}.nk"
    try:
        text = seed.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BusError(
            f"{seed} cannot be read ({error.strerror}), and the page signs in with it; make the credentials again"
        ) from None

    def originals(ref: "TaskRef") -> Mapping[str, bytes]:
        from headrace.tasks import open_suite

        return open_suite(ref.suite, config.tasks.dir).task(ref.task).files

    page = LivePage(
        config, run, bus, websocket=websocket, seed=text, started=await _began(bus, run), originals=originals
    )
    await page.start(address)
    try:
        yield page
    finally:
        await page.close()


async def _began(bus: "Bus", run: str) -> float:
    """The time at which the run's first event was stored; the present time when there is none."""
    from headrace.messages import subjects

    async for received in bus.history("HR_EVENT", subjects.EVENT.where(run=run)):
        return received.time
    return time.time()
