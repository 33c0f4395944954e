"""Measures the processor time of `headrace top` until it shows the actors, beside Textual's own.

    python -m benchmarks.top [--rounds 5]

A round starts three programs, each in a process and a terminal of its own: `headrace top` on a run with three actors
at a real broker, a Python that only imports the parts of Textual that it uses, and a Textual app with the same widgets
and nothing of headrace. `q` is pressed once the actors are on the screen. The figures are medians. The target is 0.3 s
of processor time beside the import of Textual. Processor time grows on a busy machine too, by shared caches and cores:
compare the ratio with the import of the same round.
"""

import argparse
import asyncio
import os
import pty
import resource
import select
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.conditions import at_most, cannot_run, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.messages.operations import Heartbeat

RUN = "bench"
ACTORS = ("judge", "rollout", "trainer")
COLUMNS = ("actor", "state", "busy", "node", "pid", "status")
PATIENCE_S = 60.0
IMPORT = "from textual.app import App; from textual.widgets import DataTable, Footer, Input, Static"
BARE = f"""
{IMPORT}
class Bare(App):
    CSS = CSS
    BINDINGS = [("q", "quit", "Quit")]
    def compose(self):
        yield Static("{ACTORS[-1]}", id="head")
        yield Input(id="filter")
        yield DataTable(id="actors")
        yield Static(id="detail")
        yield Footer()
    def on_mount(self):
        self.query_one("#actors").add_columns(*{COLUMNS})
        self.query_one("#actors").focus()
Bare().run()
"""


def cpu_of(words: list[str], shown: bytes = b"") -> float:
    """Processor seconds of a program in a terminal; `q` is pressed when it has shown these bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid, terminal = pty.fork()
    if not pid:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
        os.execv(sys.executable, [sys.executable, *words])
    said, pressed = b"", not shown
    ends = time.monotonic() + PATIENCE_S
    try:
        while select.select([terminal], [], [], max(0.0, ends - time.monotonic()))[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the program has ended
                break
            said += part
            if not part:
                break
            if not pressed and shown in said:
                os.write(terminal, b"q")
                pressed = True
        else:
            os.kill(pid, 9)
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
    if code or not pressed:
        cannot_run(f"{' '.join(words[:4])} ended with code {code}: {said[-300:].decode('utf-8', 'replace')}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """The times of every round by program."""
    from headrace.dashboard.terminal import Top

    bare = f"CSS = {Top.CSS!r}\n{BARE}"
    times: dict[str, list[float]] = {"import": [], "bare": [], "top": []}
    async with Server(folder / "broker") as server:
        async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as bus:
            await declare(bus)
            presence = await bus.kv("HR_PRESENCE")
            config = folder / "run.toml"
            config.write_text(
                f'[run]\nid = "{RUN}"\n[bus]\nurl = "{server.url}"\ncredentials = "{server.credentials}"\n'
            )
            last = ACTORS[-1].encode()
            programs = {
                "import": (["-c", f"{IMPORT}\nDataTable, Footer, Input, Static"], b""),
                "bare": (["-c", bare], last),
                "top": (["-m", "headrace.cli", "top", "--config", str(config)], last + b"-1"),
            }
            for _ in range(rounds):
                for actor in ACTORS:  # again in each round: a heartbeat expires
                    beat = Heartbeat(actor=actor, id=f"{actor}-1", node="here", pid=1, state="running", run=RUN)
                    await presence.put(f"{actor}.{actor}-1", beat)
                for name, (words, shown) in programs.items():
                    times[name].append(await asyncio.to_thread(cpu_of, words, shown))
    return times


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measure(Path(folder), args.rounds))
    imported, bare, top = (statistics.median(times[name]) for name in ("import", "bare", "top"))
    beside = statistics.median(all - own for all, own in zip(times["top"], times["import"], strict=True))
    figures = {
        "top_cpu_s": round(top, 3),
        "import_textual_cpu_s": round(imported, 3),
        "textual_app_cpu_s": round(bare, 3),
        "top_beside_import_cpu_s": round(beside, 3),
        "top_over_import": round(top / imported, 2),
        "top_over_textual_app": round(top / bare, 2),
        "rounds": args.rounds,
    }
    finish(figures, {"top_beside_import_cpu_s": at_most(figures["top_beside_import_cpu_s"], 0.3)}, "textual")


if __name__ == "__main__":
    main()
