"""Law 1 for commands and pages: records that nobody can read change nothing that is printed or shown about a run.

Every command that reads streams runs on the recorded run, first as it is, then with mutated records of every message
type among its own. `READERS` and `OTHERS` together are all commands, so that a new one has to be put in one of them.
"""

import argparse
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.bus.broker import credentials
from headrace.bus.broker.credentials import WRITERS
from headrace.bus.broker.server import Server, open_store
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.cli.main import main, parser
from headrace.dashboard.exporters.follow import follow
from headrace.dashboard.live import attempt, history, panels
from headrace.dashboard.live.panels import PANELS
from headrace.dashboard.records import collect
from headrace.launch.measuring import evaluation
from headrace.messages import subjects as s
from headrace.tasks.packages.fetch import unpack
from headrace.weights.signing import PUBLIC_FILE
from tests.support import mutations
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S

RUN = "recorded"
ARCHIVE = Path(__file__).with_name("recorded") / "run.tar.xz"
READERS: dict[str, tuple[str, ...]] = {
    "status": ("status", RUN),
    "status --regions": ("status", RUN, "--regions"),
    "audit": ("audit", RUN),
    "gate": ("gate", RUN),
    "replay": ("replay", RUN, "--step", "2"),
    "rejudge": ("rejudge", RUN, "--judge", "again", "--recorded"),
    "dlq": ("dlq", RUN),
    "dlq --show": ("dlq", RUN, "--show", "1"),
    "export": ("export", RUN, "{folder}-exported"),
    "export --as data": ("export", RUN, "{folder}.jsonl", "--as", "data", "--reward", "-9"),
    "export --as atif": ("export", RUN, "{folder}.jsonl", "--as", "atif"),
    "export --as patches": ("export", RUN, "{folder}.jsonl", "--as", "patches"),
    "export --as safetensors": ("export", RUN, "{folder}.safetensors", "--as", "safetensors"),
    "bus backup": ("bus", "backup", "{folder}", "--run", RUN, "--live"),
    "weights log": ("weights", "log", RUN),
    "weights log --version": ("weights", "log", RUN, "--version", "-1"),
    "weights log --verify": ("weights", "log", RUN, "--verify"),
    "weights log --since": ("weights", "log", RUN, "--version", "3", "--since", "1"),
    "weights log --collect": ("weights", "log", RUN, "--collect", "3"),
}
"""A command, perhaps with an option, to its arguments; `{folder}` is a name that is new for each pass."""
OTHERS = {
    "up, actor, chaos": "start actors, which test_unreadable.py drives",
    "eval": "starts actors, too; tests/bench/test_measured.py pollutes the streams that a benchmark is read from",
    "dashboard, top": "follow a live run: test_unreadable.py and `views` drive their readers",
    "purge, lines, trainer set, trainer rollback": "ask a running actor",
    "policy train": "reads files of text",
    "retrain": "replays steps as `replay` does, for minutes",
    "bus restore": "writes the files of a backup",
    "down, logs": "read processes and log files",
    "init, check, try, estimate, deploy, trainer plan, bus declare": "read no records",
    "acp": "read no records",
    "trainer join": "starts ranks, which take their records from the trainer",
    "tasks make, tasks import, tasks certify, tasks export, tasks probe, tasks show": "files",
    "policy from-gguf, policy from-lora, mcp serve, keys, images, harness": "files",
    "vm build, vm run, vm gc": "sandboxes",
}
"""Commands that are not run here, and why."""


VARIES = re.compile(
    r'"forged": \d+, |"skipped_count": \d+, "skipped": \[.*?\], (?=")|[\d.]+ (?:B|KiB|MiB|bytes|messages)\b'
)
"""The parts that name the unreadable records or count them."""


def commands(of: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of all commands."""
    below = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield " ".join(words)
    for action in below:
        for name, parser_of_it in action.choices.items():
            yield from commands(parser_of_it, (*words, name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run, below `runs/`."""
    runs = tmp_path_factory.mktemp("commands") / "runs"
    runs.mkdir()
    return unpack(ARCHIVE, runs / "unpacked").rename(runs / RUN)


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Server]:
    """A broker on the run's streams."""
    server = uvloop.run(open_store(folder / "broker"))
    credentials.trust(server.credentials, folder / WRITERS)  # the broker made new seeds
    (server.credentials / PUBLIC_FILE).write_bytes((folder / PUBLIC_FILE).read_bytes())
    uvloop.run(declared(server))
    yield server
    uvloop.run(server.stop())


async def declared(store: Server) -> None:
    async with await Bus.connect(store.url, role="admin", credentials=store.credentials) as admin:
        await declare(admin)


async def polluted(store: Server) -> int:
    async with await as_writers(store.url, store.credentials) as admin:
        return await mutations.pollute(admin, RUN)


class Written:
    """A writer of `export --as metrics` that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def write(self, *figures: object) -> None:
        self.lines.append(figures)

    def close(self) -> None:
        pass


async def exported(bus: Bus, state: Path) -> list[object]:
    """The figures of the finished run."""
    written = Written()
    async with asyncio.timeout(PATIENCE_S):
        await follow(bus, RUN, {"written": written}, state)
    return written.lines


def test_every_command_has_its_place() -> None:
    listed = {words.partition(" -")[0] for words in READERS}
    listed |= {name for names in OTHERS for name in names.split(", ")}
    assert sorted(listed) == sorted(commands(parser()))


async def views(store: Server, state: Path) -> dict[str, object]:
    """The records as the report and the live page read them."""
    async with (
        await Bus.connect(store.url, role="operator", credentials=store.credentials) as report,
        await Bus.connect(store.url, role="dashboard", credentials=store.credentials) as bus,
    ):
        attempts = [received async for received in bus.history("HR_TRAJ", s.TRAJ.where(run=RUN))]
        last = attempts[-1]
        read: dict[str, object] = {
            name: await panel(bus, RUN, 0) for name, panel in PANELS.items() if name != "behaviour"
        }
        return read | {
            "behaviour": (await panels.behaviour(bus, RUN, 0)).attempts,
            "newest version of eval": await evaluation.newest(report, RUN),
            "report": await collect(report, RUN, []),
            "history": await history.records(bus, RUN, users=True),
            "metrics": await exported(bus, state),
            "attempt": await attempt.describe(bus, RUN, last.seq, last.message, lambda _: {}),
        }


def test_unreadable_records_change_nothing_that_is_printed_or_shown(
    folder: Path, store: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent.parent)

    def printed(name: str) -> dict[str, tuple[int, str]]:
        answers = {}
        for command, words in READERS.items():
            code = main([word.format(folder=name) for word in words])
            out, error = capsys.readouterr()
            said.append(error)
            answers[command] = (code, VARIES.sub("", out.replace(name, "")))
        return answers

    said: list[str] = []
    clean = printed("clean")
    assert not any("skipped" in error for error in said)
    # A processor of another kind may round otherwise: then the replay says that, with an exit code of 1.
    code, replayed = clean["replay"]
    assert code == 0 or msgspec.json.decode(replayed.splitlines()[-1])["fingerprint_match"] is False, replayed
    failed = [command for command, (code, _) in clean.items() if code and command != "replay"]
    assert failed == ["dlq --show", "export --as data"], [text for text in said if text]
    shown = uvloop.run(views(store, folder / "clean"))
    assert uvloop.run(polluted(store)) > 300
    assert printed("polluted") == clean
    assert uvloop.run(views(store, folder / "polluted")) == shown
    assert sum("skipped an unreadable record" in error for error in said) > len(READERS) // 2
