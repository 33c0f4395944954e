"""Writes docs/listeners.md from the table of listeners (`make docs`)."""

from pathlib import Path

from headrace.launch.checks.listeners import table

if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(table())
