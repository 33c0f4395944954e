"""Values of a task.toml, and texts of its folder: each has its type, or the entry is refused."""

from pathlib import Path
from typing import Any

from headrace.tasks.importing.base import ImportRefused


def table_of(config: dict[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """A table; empty where there is none. where: of `config`, as a prefix. ImportRefused."""
    table = config.get(key, {})
    if not isinstance(table, dict):
        raise ImportRefused(f"task.toml: expected a table [{where}{key}]")
    return table


def list_of(table: dict[str, Any], key: str, where: str = "") -> list[Any]:
    """A list; empty where there is none. where: of `table`, as a prefix. ImportRefused."""
    value = table.get(key) or []
    if not isinstance(value, list):
        raise ImportRefused(f"task.toml: expected a list {where}{key}, got {value!r:.80}")
    return value


def text_at(path: Path) -> str:
    """The text of a file; empty where there is none. ImportRefused for bytes that are no UTF-8."""
    if not path.is_file():  # also a pipe, which may never be written to
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ImportRefused(f"{path.name}: expected UTF-8") from None
