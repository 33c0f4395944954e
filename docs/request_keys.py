"""Writes docs/request_keys.md from the tables of keys (`make docs`)."""

from pathlib import Path

from headrace.gateway.dialects.keys import page

if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page())
