"""Writes the section "One line per module" of architecture.md from the modules' own docstrings (`make docs`)."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## One line per module\n"


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring, whole sentence."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def section() -> str:
    """The whole section: a list per room."""
    lines = [HEADING]
    rooms: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "headrace").rglob("*.py")):
        parts = path.relative_to(ROOT / "headrace").parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    for room, paths in rooms.items():
        lines.append(f"\n**headrace/{room}{'/' if room else ''}**\n\n")
        for path in paths:
            if path.name != "__init__.py" or not room:
                inside = path.relative_to(ROOT / "headrace" / room)
                lines.append(f"- `{inside}`: {first_sentence(path)}\n")
    return "".join(lines)


def page() -> str:
    """The page as it should be."""
    return PAGE.read_text(encoding="utf-8").split(HEADING)[0] + section()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
