"""`headrace top`: actors of a run in the terminal, live: sorted, filtered, each with its figures, events and logs."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from headrace.bus.connection import Bus
from headrace.dashboard.watch import Watch
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.operations import Heartbeat
from headrace.terminal_text import plain

SILENT_S = 10.0
COLUMNS = ("actor", "state", "busy", "node", "pid", "status")
LinesOf = Callable[[str], list[str]]
"""The newest log lines of an actor or of a process."""


class Top(App[None]):
    """The screen."""

    CSS = """
    #head { height: 3; padding: 0 1; } #filter { display: none; height: 3; } DataTable { height: 1fr; }
    #detail { height: 14; padding: 0 1; border-top: solid $primary; overflow-y: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter"),
        Binding("enter", "show_figures", "Figures", priority=True),
        Binding("l", "show_logs", "Logs"),
        Binding("e", "show_events", "Events"),
        Binding("t", "show_trace", "Trace"),
        Binding("d", "drain", "Drain"),
        Binding("escape", "clear", "Clear"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, watch: Watch, bus: Bus, run: str, lines_of: LinesOf) -> None:
        super().__init__()
        self.run_watch, self.bus, self.run_id, self._lines_of = watch, bus, run, lines_of
        self.beats: dict[str, tuple[float, Heartbeat]] = {}
        self.sorted_by, self.wanted, self.detail = 0, "", "figures"
        self._draining = ""

    def compose(self) -> ComposeResult:
        """Head, filter, table, detail, keys."""
        yield Static(id="head", markup=False)
        yield Input(placeholder="actor, state, node or status", id="filter")
        yield DataTable(id="actors", cursor_type="row", zebra_stripes=True)
        yield Static(id="detail", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        """Start reading."""
        table = self.query_one("#actors", DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        await self.bus.listen(s.HEARTBEAT.where(), self._on_heartbeat)
        presence = await self.bus.kv("HR_PRESENCE")
        for beat, *_ in (await presence.items()).values():
            await self._on_heartbeat(beat)
        self.run_worker(self.run_watch.until_finished(lambda _: None), exclusive=True)
        self.set_interval(0.5, self.draw)
        table.focus()
        self.draw()

    async def _on_heartbeat(self, message: Message) -> None:
        if isinstance(message, Heartbeat) and message.run in ("", self.run_id):
            self.beats[message.id] = (time.time(), message)

    def rows(self) -> list[tuple[str, ...]]:
        """A row per actor that passes the filter, in the chosen order."""
        now = time.time()
        rows = []
        for moment, beat in self.beats.values():
            silent = now - moment
            state = beat.state if silent < SILENT_S or beat.state == "stopped" else f"silent {silent:.0f} s"
            status = "; ".join(text for text in (beat.status, beat.waits and f"waits for {beat.waits}") if text)
            rows.append((beat.id, state, f"{beat.busy:4.0%}", beat.node, str(beat.pid), status))
        words = self.wanted.lower().split()
        rows = [row for row in rows if all(word in " ".join(row).lower() for word in words)]
        column, name = self.sorted_by, COLUMNS[self.sorted_by]
        return sorted(rows, key=lambda row: row[column], reverse=name == "busy")

    def draw(self) -> None:
        """Draw the newest state. Does nothing once the widgets are removed: the timer also fires at the end."""
        if not self.query("#detail"):
            return
        last = self.run_watch.steps[-1] if self.run_watch.steps else None
        staleness = f"staleness {last.staleness_max}/{last.staleness_bound}" if last else "no step yet"
        note = f"  {self._draining}" if self._draining else ""
        use = "".join(
            f", {name} {100 * sum(shares) / len(shares):.0f} %"
            for name, shares in (("CPU", self.use("cpu")), ("GPU", self.use("gpu")))
            if shares
        )
        self.query_one("#head", Static).update(
            f"{self.run_id}  {plain(self.run_watch.line())}\n{len(self.beats)} actors{use}, {staleness}, sorted by "
            f"{COLUMNS[self.sorted_by]}{f', filter {self.wanted!r}' if self.wanted else ''}{note}"
        )
        table = self.query_one("#actors", DataTable)
        chosen = self.chosen()
        table.clear()
        for row in self.rows():
            table.add_row(*(Text(plain(cell)) for cell in row), key=row[0])
        if chosen in [row[0] for row in self.rows()]:
            table.move_cursor(row=table.get_row_index(chosen), animate=False)
        self.query_one("#detail", Static).update(plain("\n".join(self.details(self.chosen()))))

    def use(self, name: str) -> list[float]:
        """The shares of processors (cpu) or GPUs (gpu) in use: one for each node that tells."""
        nodes = {beat.node: getattr(beat, name) for _, beat in sorted(self.beats.values(), key=lambda entry: entry[0])}
        return [share for share in nodes.values() if share is not None]

    def chosen(self) -> str:
        """Id of the actor under the cursor; empty without one."""
        table = self.query_one("#actors", DataTable)
        return str(table.get_row_at(table.cursor_row)[0]) if table.is_valid_row_index(table.cursor_row) else ""

    def details(self, id: str) -> Iterable[str]:
        """The lines below the table."""
        if id not in self.beats:
            return []
        beat = self.beats[id][1]
        if self.detail == "logs":
            return [f"logs of {id}:", *self._lines_of(id)[-11:]]
        if self.detail == "trace":
            traces = [line.rpartition("trace=")[2] for line in self._lines_of(id) if "trace=" in line]
            return [f"newest traces of {id} (headrace logs --trace ID):", *list(dict.fromkeys(traces[::-1]))[:10]]
        if self.detail == "events":
            events = [event for _, event in self.run_watch.events if event.id == id]
            return [f"events of {id}:", *(f"{each.level:<8}{each.kind}: {each.text}" for each in events[-11:])]
        figures = self.run_watch.metrics.get(f"{beat.actor}:{id}", {})
        return [f"figures of {id}:", *(f"  {name:<24}{value:>16,.4g}" for name, value in sorted(figures.items()))]

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sorted_by = (self.sorted_by + 1) % len(COLUMNS)
        self.draw()

    def action_filter(self) -> None:
        """Ask for the filter."""
        entry = self.query_one("#filter", Input)
        entry.styles.display = "block"
        entry.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self.wanted = event.value
        self.draw()

    def action_clear(self) -> None:
        """Leave the filter empty and go back to the table."""
        entry = self.query_one("#filter", Input)
        entry.value, entry.styles.display = "", "none"
        self.query_one("#actors", DataTable).focus()

    def action_show_figures(self) -> None:
        """Show the actor's figures; in the filter: go back to the table."""
        self.query_one("#filter", Input).styles.display = "none"
        self.query_one("#actors", DataTable).focus()
        self._show("figures")

    def action_show_logs(self) -> None:
        """Show the newest log lines of the actor."""
        self._show("logs")

    def action_show_events(self) -> None:
        """Show the newest events of the actor."""
        self._show("events")

    def action_show_trace(self) -> None:
        """Show the newest trace ids of the actor."""
        self._show("trace")

    def _show(self, what: str) -> None:
        self.detail = what
        self.draw()

    def action_drain(self) -> None:
        """Drain the actor's process: press twice. `headrace up` starts another one."""
        id = self.chosen()
        if id not in self.beats:
            return
        beat = self.beats[id][1]
        question = f"press d again to drain process {beat.pid} of {id}"
        if self._draining != question:
            self._draining = question
        else:
            self._draining = drain(beat, self.bus.node)
        self.draw()


def drain(beat: Heartbeat, node: str) -> str:
    """Send SIGTERM to an actor's process on this node; the sentence that says what was done."""
    if beat.node != node:
        return f"{beat.id} runs on {beat.node}: drain it there (kill -TERM {beat.pid})"
    try:
        words = Path(f"/proc/{beat.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {beat.pid} of {beat.id} has ended"
    if b"actor" not in words:
        return f"process {beat.pid} runs more than actors of headrace: it is left alone"
    os.kill(beat.pid, signal.SIGTERM)
    return f"process {beat.pid} of {beat.id} drains"


def run_top(watch: Watch, bus: Bus, run: str, lines_of: LinesOf) -> Any:
    """The coroutine that shows the screen until it is left."""
    return Top(watch, bus, run, lines_of).run_async()
