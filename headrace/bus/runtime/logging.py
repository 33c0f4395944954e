"""One JSON line per event to stderr or a file, with the ids of the trace that it belongs to."""

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog

from headrace.bus.runtime import tracing

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_file: TextIO | None = None


def _trace_ids(_: Any, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    context = tracing.current()
    if context is not None:
        line["trace_id"], line["span_id"] = context
    return line


def configure(file: str | Path | None = None, level: str = "info") -> None:
    """Log this process to stderr, or append to a file."""
    global _file
    if _file is not None:
        _file.close()
    _file = open(file, "a", encoding="utf-8", buffering=1) if file else None
    stream: TextIO = _file or sys.stderr
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _trace_ids,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )


def get(**fields: str) -> Any:
    """A logger whose lines all carry `fields`."""
    return structlog.get_logger().bind(**fields)
