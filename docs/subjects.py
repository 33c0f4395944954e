"""Writes docs/subjects.md and docs/permissions.md, the tables of subjects, streams and roles (`make docs`)."""

from pathlib import Path

from headrace.bus.broker import matrix
from headrace.messages import subjects

DOCS = Path(__file__).resolve().parent
PAGES = {DOCS / "subjects.md": subjects.table, DOCS / "permissions.md": matrix.table}


if __name__ == "__main__":
    for page, table in PAGES.items():
        page.write_text(table(), encoding="utf-8")
