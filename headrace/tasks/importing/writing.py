"""Writing an imported suite: entry after entry, with a journal, so that an interrupted import continues.

The index is written last, as with every suite: until then the folder is not a suite. At the end `import.json` holds the
number of tasks, the refused entries with their reasons, and the settings that were left out of the other entries.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import UNSET

from headrace.tasks.altering import altered
from headrace.tasks.base import Trust
from headrace.tasks.importing.base import ImportRefused, MadeTask, SourceEntry
from headrace.tasks.suites import write_index, write_task

JOURNAL, REPORT = "import.jsonl", "import.json"
LONGEST_REASON = 1000
"""Characters of a refusal's reason that are stored and shown."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One entry in the journal."""

    id: str
    digest: str
    refused: str = ""
    notes: tuple[str, ...] = ()
    trust: Trust = "report"


class Refusal(msgspec.Struct, frozen=True):
    """An entry that made no task."""

    id: str
    reason: str


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an import."""

    suite: str
    source: str
    tasks: int
    made: int
    """Tasks that this call made; the others were made before it was cut off."""
    refused: tuple[Refusal, ...]
    notes: dict[str, int]
    """Settings that were left out, with the number of tasks that have each."""
    trust: Trust


def import_suite(
    name: str, folder: Path, source: str, entries: Iterable[SourceEntry], say: Callable[[str], None] = lambda text: None
) -> ImportReport:
    """Import every entry that is not in the journal yet, and write index and report. SourceError of the reader."""
    folder.mkdir(parents=True, exist_ok=True)
    journaled = {line.id: line for line in _read(folder / JOURNAL)}
    lines: dict[str, Line] = {}
    twice: list[Refusal] = []
    made = 0
    with (folder / JOURNAL).open("ab") as journal:
        for entry in entries:
            if entry.id in lines:
                twice.append(Refusal(entry.id, "an earlier entry has the same id"))
                continue
            line = journaled.get(entry.id)
            # What refused an entry, such as a checkout that was missing, may be mended now.
            if line is None or line.refused or line.digest != entry.digest or not _complete(folder, line):
                line = _import(folder, entry)
                made += not line.refused
                journal.write(msgspec.json.encode(line) + b"\n")
                journal.flush()
                if line.refused:
                    say(f"refused {entry.id}: {line.refused}")
            lines[entry.id] = line
    tasks = [line for line in lines.values() if not line.refused]
    trust: Trust = "log" if any(line.trust == "log" for line in tasks) else "report"
    write_index(name, folder, [line.id for line in tasks], source, trust)
    report = ImportReport(
        suite=name,
        source=source,
        tasks=len(tasks),
        made=made,
        refused=(*(Refusal(line.id, line.refused) for line in lines.values() if line.refused), *twice),
        notes=dict(Counter(note for line in tasks for note in line.notes)),
        trust=trust,
    )
    (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _import(folder: Path, entry: SourceEntry) -> Line:
    try:
        made: MadeTask = entry.make()
    except ImportRefused as error:
        return Line(id=entry.id, digest=entry.digest, refused=_shown(str(error)))
    oracle = made.oracle
    if oracle.grading.trust == "log" and altered(oracle.hidden, random.Random(0)):
        # A log that says the same of altered tests is found out (judging/hidden/control.py).
        made = msgspec.structs.replace(
            made,
            task=msgspec.structs.replace(made.task, trust="report"),
            oracle=msgspec.structs.replace(oracle, grading=msgspec.structs.replace(oracle.grading, trust="report")),
        )
    notes = tuple(map(_shown, made.notes))
    write_task(folder, made.task, msgspec.structs.replace(made.oracle, left_out=notes or UNSET))
    return Line(id=entry.id, digest=entry.digest, notes=notes, trust=made.oracle.grading.trust)


def _shown(reason: str) -> str:
    """A reason that fits a terminal: it quotes its source, which may be megabytes long or move the cursor."""
    short = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in short)


def _complete(folder: Path, line: Line) -> bool:
    return all((folder / f"{line.id}.{side}").exists() for side in ("task", "oracle"))


def _read(path: Path) -> list[Line]:
    """The lines of a journal. A line that was cut off is skipped."""
    lines = []
    for data in path.read_bytes().splitlines() if path.exists() else []:
        try:
            lines.append(msgspec.json.decode(data, type=Line))
        except msgspec.DecodeError:
            continue
    return lines
