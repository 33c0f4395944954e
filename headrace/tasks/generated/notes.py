"""Tasks whose answer has to be carried through two cleared contexts, made from a number.

``start.txt`` names another file and shows four marked values. The other file shows a code. ``answer()`` has to return
the code and the value at `KEY`; no text of a task names that mark, so the final reward alone tells which value a
summary has to keep.

Why two files: their chain makes both summaries necessary. With `max_turns` = 3, `max_parallel_calls` = 1 and a context
that each file fills (deploy/proof-compaction.toml), the turns suffice for the first file, the file that it names, and
the edit. The values cannot be read a second time, and the code is not known before the second turn.

Trade-off: 8^4 values, 8 names and 8 codes give 262,144 different tasks, so a held-out task may equal one of training. A
policy that knew every task by heart would have nothing to recall it by: the prompts are equal.
"""

import random
from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.base import UnknownSuite
from headrace.tasks.generated.seeds import SeedIds
from headrace.tasks.sealing import known, seal

SEEDS: Mapping[str, range] = {"notes": range(1_000_000, 1_000_000_000), "notes-heldout": range(0, 2_000)}
"""Which seeds a suite owns."""
TOOLS = ("read_file", "edit_file", "finish")
START, ANSWER_FILE, HIDDEN = "start.txt", "answer.py", "test_answer.py"
MARKS = "abcd"
KEY = 2
"""Index of the mark whose value is the answer."""
VALUES = 8
"""Values and codes are digits from 0 to VALUES - 1."""
NAMES = ("red.txt", "blue.txt", "green.txt", "gold.txt", "grey.txt", "pink.txt", "black.txt", "white.txt")
PROMPT = "start.txt tells what answer() returns"
_WORDS = ("wait", "ok", "retry", "sync", "load", "done")
_LINES, _WIDTH = 3, 3
"""Lines of a log behind the first line of each file, and words per line: they fill the context."""
_SAMPLE = 4
"""Tasks of a suite that a certificate examines; all have one template."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A task with everything that is known about it. Only `task` may reach an agent."""

    task: Task
    oracle: Oracle
    values: tuple[int, ...]
    """Of `MARKS`, in their order."""
    name: str
    """The file that `START` names."""
    code: int


def line(code: int, value: int) -> str:
    """The line of `ANSWER_FILE` that returns the answer."""
    return f"    return {code}, {value}"


def make(kind: str, seed: int) -> Made:
    """The task of a seed of a suite."""
    rng = random.Random(f"headrace/notes/{seed}")
    values = tuple(rng.randrange(VALUES) for _ in MARKS)
    name, code = rng.choice(NAMES), rng.randrange(VALUES)

    def file(first: str) -> bytes:
        log = [" ".join(rng.choices(_WORDS, k=_WIDTH)) for _ in range(_LINES)]
        return ("\n".join([first, *log]) + "\n").encode()

    marked = " ".join(f"{mark} {value}" for mark, value in zip(MARKS, values, strict=True))
    files = {
        START: file(f"{name} {marked}"),
        name: file(f"code {code}"),
        ANSWER_FILE: _module("    return None"),
    }
    test = (
        f"from answer import answer\n\n\ndef test_answer():\n    assert answer() == ({code}, {values[KEY]})\n".encode()
    )
    ref, sealed = TaskRef(f"generated/{kind}", str(seed)), seal({HIDDEN: test})
    task = Task(
        ref=ref, family="notes", prompt=PROMPT, files=files, allowed=(ANSWER_FILE,), tools=TOOLS, tests=TestPlan()
    )
    oracle = Oracle(
        ref=ref,
        hidden={HIDDEN: test},
        sealed=sealed.files,
        answers=known(sealed),
        tests=TestPlan(paths=(HIDDEN,)),
        expected=(f"{HIDDEN}::test_answer",),
        solution={ANSWER_FILE: _module(line(code, values[KEY]))},
    )
    return Made(task=task, oracle=oracle, values=values, name=name, code=code)


def _module(line: str) -> bytes:
    return f"def answer():\n{line}\n".encode()


class NotesSuite:
    """The tasks of a kind."""

    def __init__(self, kind: str) -> None:
        self.name, self._kind, self._ids = f"generated/{kind}", kind, SeedIds(SEEDS[kind])

    def ids(self) -> Sequence[str]:
        """Seeds as text."""
        return self._ids

    @property
    def source(self) -> str:
        """Hash of what every task follows from: another one makes the suite's certificates void."""
        parts = (PROMPT, MARKS, KEY, VALUES, NAMES, _WORDS, _LINES, _WIDTH)
        return sha256(msgspec.json.encode(parts)).hexdigest()

    @property
    def sample(self) -> Sequence[str]:
        """The first ids: what a certificate of the suite covers."""
        return tuple(self._ids[:_SAMPLE])

    def covered_by(self, id: str) -> str:
        """The task of the sample whose certificate covers this one."""
        return self.sample[int(self._made(id).task.ref.task) % _SAMPLE]

    def task(self, id: str) -> Task:
        """The agent's side."""
        return self._made(id).task

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        return self._made(id).oracle

    def _made(self, id: str) -> Made:
        if id not in self._ids:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        return make(self._kind, int(id))
