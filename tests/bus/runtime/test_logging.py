"""One JSON line per event, with the ids of its trace."""

import json
from pathlib import Path

import structlog

from headrace.bus.runtime import logging, tracing


def test_lines_are_json_with_trace_ids(tmp_path: Path) -> None:
    file = tmp_path / "actor.log"
    logging.configure(file, "info")
    try:
        log = logging.get(actor="judge", id="j1", run="r1")
        log.debug("too quiet")
        log.info("outside")
        with tracing.span("work") as span:
            log.warning("inside", seq=3, path=file)
    finally:
        logging.configure()
        structlog.reset_defaults()
    outside, inside = [json.loads(line) for line in file.read_text().splitlines()]
    assert (outside["event"], outside["level"], outside["actor"]) == ("outside", "info", "judge")
    assert "trace_id" not in outside
    assert (inside["trace_id"], inside["span_id"]) == span.context
    assert inside["seq"] == 3 and inside["timestamp"].endswith("Z")
