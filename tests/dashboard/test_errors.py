"""The report counts error events and shows the first of each kind with its text."""

from typing import cast

import pytest

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard import errors
from headrace.dashboard.watch import Watch
from headrace.messages.operations import Event


@pytest.mark.anyio
async def test_error_events_are_counted_and_their_tracebacks_shown() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(), started=0.0)
    assert errors.counts(watch) == {} and errors.section(watch) == "<p>None.</p>"
    fault = Event(actor="judge", id="j", kind="judge_fault", level="error", text="Traceback <x>\nSyntaxError: bad")
    others = [Event(actor="judge", id="j", kind="judge_lost", level="error", text="no sandbox") for _ in range(31)]
    fine = Event(actor="judge", id="j", kind="started", text="fine")
    watch.events = [*((float(n), other) for n, other in enumerate(others)), (40.0, fine), (41.0, fault)]
    assert errors.counts(watch) == {"judge: judge_lost": 31, "judge: judge_fault": 1}
    page = errors.section(watch)
    assert "Traceback &lt;x&gt;\nSyntaxError: bad" in page and "fine" not in page and "12 more." in page
