"""`headrace top` on a real broker, without a terminal: rows, sorting, filter, details, draining."""

import asyncio
import os
from secrets import token_hex

import pytest

from headrace.config import Config
from headrace.dashboard.watch import Watch
from headrace.messages import subjects as s
from headrace.messages.operations import Event, Heartbeat, Metric
from tests.conftest import Connect

pytest.importorskip("textual", reason="pip install 'headrace[terminal]'")
from textual.widgets import DataTable, Static

from headrace.dashboard.terminal import Top, drain

pytestmark = pytest.mark.anyio


def beat(run: str, actor: str, busy: float, node: str = "n1", pid: int = 7, waits: str = "") -> Heartbeat:
    return Heartbeat(
        actor=actor, id=f"{actor}-1", node=node, pid=pid, state="running", run=run, busy=busy, waits=waits, cpu=0.5
    )


async def test_actors_are_shown_sorted_filtered_and_in_detail(connect: Connect) -> None:
    run, bus = f"r{token_hex(4)}", await connect("operator")
    admin = await connect()
    top = Top(Watch(bus, run, Config(), 0.0), bus, run, lambda id: [f"a line of {id} trace=00ff"])
    async with top.run_test(size=(140, 40)) as pilot:

        async def send() -> None:
            await admin.emit(s.HEARTBEAT.at(actor="judge", id="judge-1"), beat(run, "judge", 0.25, waits="batch 7"))
            await admin.emit(s.HEARTBEAT.at(actor="rollout", id="rollout-1"), beat(run, "rollout", 0.75))
            await admin.emit(s.HEARTBEAT.at(actor="rollout", id="other"), beat("another-run", "trainer", 1.0))
            figures = Metric(actor="rollout", id="rollout-1", run=run, time=1.0, values={"episodes": 42.0})
            await admin.emit(s.METRIC.at(actor="rollout"), figures)
            event = Event(actor="rollout", id="rollout-1", run=run, kind="greeting", text="hello")
            await admin.publish(s.EVENT.at(run=run, actor="rollout", type="event"), event)

        async with asyncio.timeout(60):
            while not (len(top.beats) == 2 and top.run_watch.events and top.run_watch.metrics):
                await send()
                await pilot.pause(0.1)
        top.draw()
        assert [row[0] for row in top.rows()] == ["judge-1", "rollout-1"]
        assert [row[-1] for row in top.rows()] == ["waits for batch 7", ""]
        assert "2 actors, CPU 50 %, no step yet" in str(top.query_one("#head", Static).render())
        await pilot.press("s", "s")
        assert [row[0] for row in top.rows()] == ["rollout-1", "judge-1"]
        await pilot.press("slash", *"rollout")
        assert [row[0] for row in top.rows()] == ["rollout-1"]
        await pilot.press("enter")
        assert any("episodes" in line and "42" in line for line in top.details("rollout-1"))
        await pilot.press("l")
        assert "a line of rollout-1" in "\n".join(top.details(top.chosen()))
        await pilot.press("e")
        assert "greeting: hello" in "\n".join(top.details(top.chosen()))
        await pilot.press("t")
        assert "00ff" in "\n".join(top.details(top.chosen()))
    top.draw()  # a timer that fires while the app ends finds no widgets


async def test_only_processes_of_actors_on_this_node_are_drained() -> None:
    assert "drain it there" in drain(beat("r1", "judge", 0.0, node="elsewhere"), "n1")
    assert "left alone" in drain(beat("r1", "judge", 0.0, pid=os.getpid()), "n1")


async def test_a_text_of_an_actor_is_no_markup_and_no_escape_sequence(connect: Connect) -> None:
    run, bus = f"r{token_hex(4)}", await connect("operator")
    admin = await connect()
    attack = "[@click=app.quit]x[/] [/nothing] \x1b]52;c;YQ==\x07\u202e"
    shown = "[@click=app.quit]x[/] [/nothing] \\x1b]52;c;YQ==\\x07\\u202e"
    top = Top(Watch(bus, run, Config(), 0.0), bus, run, lambda id: [attack])
    async with top.run_test(size=(200, 40)) as pilot, asyncio.timeout(60):
        while not top.beats or not top.run_watch.events:
            await admin.emit(s.HEARTBEAT.at(actor="judge", id="judge-1"), beat(run, "judge", 0.5, waits=attack))
            event = Event(actor="judge", id="judge-1", run=run, kind="told", text=attack)
            await admin.publish(s.EVENT.at(run=run, actor="judge", type="event"), event)
            await pilot.pause(0.1)
        top.draw()
        await pilot.pause()
        assert str(top.query_one("#actors", DataTable).get_row_at(0)[-1]) == f"waits for {shown}"
        for key in ("l", "e"):
            await pilot.press(key)
            assert shown in str(top.query_one("#detail", Static).render())
        drawn = "".join(segment.text for strip in top.screen._compositor.render_strips() for segment in strip)
        assert shown in drawn
        assert drawn.isprintable()
