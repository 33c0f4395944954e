"""Edits by quoted text: the right place or none, every ambiguity named, stale files refused."""

import inspect
import random
from types import ModuleType
from typing import Any

import pytest

from headrace.config import Environment
from headrace.harness.tools.base import Answer, Workspace
from headrace.harness.tools.files import anchors as anchoring
from headrace.harness.tools.files import delete, edit, matching, read, staleness, write
from headrace.harness.tools.process import lint
from headrace.harness.tools.search import grep, keyword
from headrace.messages.sandbox import ReadFile, WriteFiles
from headrace.tasks.generated.repositories import make
from headrace.tasks.local import LocalFiles
from headrace.vmhost.node.host import Host
from tests.support import hosts

pytestmark = pytest.mark.anyio
TASK = make("train", 4_000_000).task
SOURCES: list[ModuleType] = [matching, edit, read, write, lint, grep, keyword]

CODE = """class A:
    def one(self):
        return 1

    def two(self):
        return 1


def one():
    return "\u201ca\u201d"
"""


async def run(files: LocalFiles, memory: dict[str, str] | None = None, **arguments: str) -> Answer:
    """One call of `edit` on a.py."""
    workspace = Workspace(files, TASK, "0", memory={} if memory is None else memory)
    return await edit.TOOL.run({"path": "a.py"} | arguments, workspace)


@pytest.mark.parametrize(
    ("old", "new", "output", "line"),
    [
        ("    def two(self):\n", "    def deux(self):\n", "ok", "    def deux(self):"),
        ("def two(self):", "def deux(self):", "ok", "    def deux(self):"),
        ("    def two(self):   \n        return 1", "    pass", "ok, matched by trailing space", "    pass"),
        (
            "def two(self):\n    return 1",
            "def two(self):\n    return",
            "ok, matched by indentation",
            "        return",
        ),
        ('def one():\n    return "“a”"', 'def one():\n    return "b"', "ok", '    return "b"'),
        ("def one():\n    return \"'a'\"", "x", "", ""),
        ('    return ""a""', "    return 3", "ok, matched by unicode", "    return 3"),
    ],
)
async def test_each_rung_finds_its_place(old: str, new: str, output: str, line: str) -> None:
    files = LocalFiles({"a.py": CODE.encode()})
    answer = await run(files, old=old, new=new)
    after = files.files["a.py"].decode().split("\n")
    if output:
        assert (answer.ok, answer.output) == (True, output)
        assert line in after
    else:
        assert not answer.ok and after == CODE.split("\n")


async def test_an_ambiguous_quote_changes_nothing_and_names_every_candidate() -> None:
    files = LocalFiles({"a.py": CODE.encode()})
    answer = await run(files, old="        return 1", new="        return 2")
    assert not answer.ok and files.files["a.py"] == CODE.encode()
    assert answer.output == (
        "a.py: the text stands at 2 places (lines 3, 6)\n3:        return 1\n6:        return 1\n; quote more lines"
    )
    every = await run(files, old="        return 1", new="        return 2", replace_all="true")
    assert every == Answer("ok, 2 replacements")
    assert files.files["a.py"].count(b"return 2") == 2 and b"return 1" not in files.files["a.py"]


async def test_what_cannot_be_done_is_said() -> None:
    files = LocalFiles({"a.py": CODE.encode()})
    assert (await run(files, old="def  tow(self):", new="x")).output == (
        "a.py: the text was not found; line 5 is the most similar one: def two(self):"
    )
    assert "old is empty" in (await run(files, old=" \n", new="x")).output
    assert "the same text" in (await run(files, old="x", new="x")).output
    assert "expected true or false, got 'yes'" in (await run(files, old="x", new="y", replace_all="yes")).output
    missing = await edit.TOOL.run({"path": "b.py", "old": "x", "new": "y"}, Workspace(files, TASK, "0"))
    assert not missing.ok and "No such file" in missing.output
    assert files.files == {"a.py": CODE.encode()}


async def test_line_endings_and_bytes_that_are_no_text_survive() -> None:
    files = LocalFiles({"a.py": b"a = 1\r\nb = '\xff'\r\nc = 3\r\n"})
    assert await run(files, old="a = 1\nb", new="a = 2\nb") == Answer("ok")
    assert files.files["a.py"] == b"a = 2\r\nb = '\xff'\r\nc = 3\r\n"


async def test_a_file_that_changed_since_it_was_read_is_refused_once() -> None:
    files, memory = LocalFiles({"a.py": CODE.encode()}), dict[str, str]()
    workspace = Workspace(files, TASK, "0", memory=memory)
    assert (await read.TOOL.run({"path": "a.py"}, workspace)).ok
    await files.call(WriteFiles(files={"a.py": CODE.encode() + b"# another program was here\n"}))
    refused = await run(files, memory, old="class A:", new="class B:")
    assert refused == Answer("a.py has changed since it was last read; read it again", ok=False)
    assert (await read.TOOL.run({"path": "a.py"}, workspace)).ok
    assert await run(files, memory, old="class A:", new="class B:") == Answer("ok")
    assert await run(files, memory, old="class B:", new="class C:") == Answer("ok"), "its own edits are known"


def anchors(text: str, first: int, last: int) -> str:
    """The anchors of a range, from what read_file shows."""
    shown = {line.partition("#")[0]: line.partition(":")[0] for line in text.split("\n")}
    return f"{shown[str(first)]}-{shown[str(last)]}"


async def test_anchored_lines_are_replaced_and_a_line_without_its_hash_is_not() -> None:
    files, memory = LocalFiles({"a.py": CODE.encode()}), dict[str, str]()
    workspace = Workspace(files, TASK, "0", memory=memory)
    shown = (await read.TOOL.run({"path": "a.py", "anchors": "true"}, workspace)).output
    assert shown.split("\n")[4].endswith(":    def two(self):")
    both = anchors(shown, 5, 6)
    assert await run(files, memory, at=both, new="    def two(self):\n        return 2") == Answer("ok")
    assert files.files["a.py"].decode() == CODE.replace("two(self):\n        return 1", "two(self):\n        return 2")
    refused = await run(files, memory, at=both, new="x")
    assert not refused.ok and refused.output.startswith("a.py: line 6 does not have the hash ")
    assert refused.output.endswith("; line 3 now; read the file again"), "the same text stands in another line"
    assert await run(files, memory, at=anchors(shown, 1, 1).partition("-")[0], new="") == Answer("ok")
    assert files.files["a.py"].startswith(b"    def one(self):\n"), "an empty text removes the line"
    for wrong in ("5", "9#zzzz", "3#00001", "1#0000-"):
        assert "expected an anchor such as 12#a3f0" in (await run(files, memory, at=wrong, new="x")).output
    assert "give either old or at" in (await run(files, memory, at=both, old="x", new="y")).output
    assert (await read.TOOL.run({"path": "a.py", "anchors": "yes"}, workspace)).output == (
        "anchors: expected true or false, got 'yes'"
    )


async def test_anchors_keep_line_endings_bytes_that_are_no_text_and_the_file_s_end() -> None:
    files = LocalFiles({"a.py": b"a = 1\r\nb = '\xff'\r\nc = 3"})
    workspace = Workspace(files, TASK, "0")
    shown = (await read.TOOL.run({"path": "a.py", "anchors": "true"}, workspace)).output
    assert await run(files, at=anchors(shown, 3, 3), new="c = 4") == Answer("ok")
    assert files.files["a.py"] == b"a = 1\r\nb = '\xff'\r\nc = 4"
    assert await run(files, at=anchors(shown, 2, 2), new="b = 5\nb = 6\n") == Answer("ok")
    assert files.files["a.py"] == b"a = 1\r\nb = 5\r\nb = 6\r\nc = 4"


async def test_a_thousand_anchored_edits_change_the_named_lines_or_none() -> None:
    """Anchors of 1 to 6 lines of real sources; in half of the cases lines were added, removed or changed since."""
    rng, counts = random.Random(11), dict.fromkeys(("applied", "refused"), 0)
    texts = [inspect.getsource(module) for module in SOURCES]
    for _ in range(1000):
        before = rng.choice(texts).split("\n")
        first = rng.randrange(1, len(before) - 6)
        last = first + rng.randrange(6)
        at = anchors(anchoring.anchored(before), first, last)
        now = list(before)
        match rng.choice(["same", "same", "added", "removed", "changed"]):
            case "added":
                now.insert(rng.randrange(len(now)), "added = 1")
            case "removed":
                del now[rng.randrange(len(now))]
            case "changed":
                now[rng.randrange(len(now))] += "  # changed"
        files = LocalFiles({"a.py": "\n".join(now).encode()})
        answer = await run(files, at=at, new="REPLACED = 1")
        after = files.files["a.py"].decode().split("\n")
        ends_stand = (now[first - 1], now[last - 1]) == (before[first - 1], before[last - 1])
        assert answer.ok == ends_stand, (at, answer.output)
        assert after == ([*now[: first - 1], "REPLACED = 1", *now[last:]] if ends_stand else now)
        counts["applied" if answer.ok else "refused"] += 1
    assert min(counts.values()) > 150, counts


async def test_a_file_is_removed_and_a_folder_or_a_missing_one_is_not() -> None:
    files = LocalFiles({"a.py": b"", "b/c.py": b""})
    workspace = Workspace(files, TASK, "0")
    assert await delete.TOOL.run({"path": "a.py"}, workspace) == Answer("ok")
    assert list(files.files) == ["b/c.py"]
    assert not (await delete.TOOL.run({"path": "b"}, workspace)).ok
    assert not (await delete.TOOL.run({"path": "a.py"}, workspace)).ok


def spoilt(rng: random.Random, kind: str, lines: list[str]) -> list[str]:
    """A quote of these lines as a policy gets it slightly wrong."""
    if kind == "trailing":
        return [line + rng.choice(["", " ", "\t"]) for line in lines]
    if kind == "indentation":
        depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        return [(line[depth:] if depth else f"    {line}") if line.strip() else line for line in lines]
    if kind == "unicode":
        return [line.replace('"', "\u201c").replace("-", "\u2013") for line in lines]
    return lines


async def test_a_thousand_edits_never_land_in_a_wrong_place() -> None:
    """Quotes of 1 to 6 lines from real sources: exact, slightly wrong in one way, or made up."""
    rng = random.Random(7)
    texts = [inspect.getsource(module) for module in SOURCES]
    counts = dict.fromkeys(("applied", "recoverable", "ambiguous", "absent"), 0)
    cases = 0
    while cases < 1000:
        text = rng.choice(texts)
        lines = text.split("\n")
        first = rng.randrange(len(lines) - 6)
        quote = lines[first : first + rng.randrange(1, 7)]
        if not quote[0].strip() or not quote[-1].strip():
            continue
        cases += 1
        kind = rng.choice(["exact", "trailing", "indentation", "unicode", "absent"])
        old = "\n".join(["made_up_line = 1", *quote] if kind == "absent" else spoilt(rng, kind, quote)).strip("\n")
        # Where else would a reader see these lines? Compare without indentation, trailing space and typography.
        plain = [matching._plain(line).strip() for line in lines]
        wanted = [matching._plain(line).strip() for line in quote]
        twins = [at for at in range(len(plain)) if plain[at : at + len(wanted)] == wanted]
        files = LocalFiles({"a.py": text.encode()})
        answer = await run(files, old=old, new="REPLACED = 1")
        after = files.files["a.py"].decode()
        if kind == "absent":
            assert not answer.ok and after == text
            counts["absent"] += 1
        elif answer.ok:
            counts["applied"] += 1
            begin = after.index("REPLACED = 1")
            assert after.count("REPLACED = 1") == 1
            number = after.count("\n", 0, begin)
            assert number in twins or kind == "exact", (old, number, twins)
            assert text.startswith(after[:begin]) and text.endswith(after[begin + len("REPLACED = 1") :])
        else:
            assert after == text
            if "places" in answer.output:
                counts["ambiguous"] += 1
        if kind not in ("absent",) and len(twins) == 1:
            counts["recoverable"] += 1
            assert answer.ok or text.count(old) > 1, (kind, old, answer.output)
    assert counts["recoverable"] > 400 and counts["ambiguous"] > 2 and counts["absent"] > 100, counts


def test_the_ladder_is_the_same_for_all() -> None:
    match: Any = matching.find("a\n  b\n", "b", "c")
    assert match == ("exact", ((4, 5, ((4, 5, "c"),)),))


async def test_a_file_of_more_than_a_mebibyte_keeps_its_end_and_a_huge_one_is_refused() -> None:
    host = await Host.open(Environment(backend="process"))
    try:
        files = {"a.py": b"first = 1\n" + b"#" * (2 << 20) + b"\nlast = 1\n", "b.py": b"x" * (staleness.LARGEST + 1)}
        sandbox = await host.acquire(hosts.ask(0, group="large", files=files))
        answer = await edit.TOOL.run(
            {"path": "a.py", "old": "first = 1", "new": "first = 2"}, Workspace(sandbox, TASK, "0")
        )
        assert answer == Answer("ok")
        after = (await sandbox.call(ReadFile(path="a.py", limit=4 << 20))).data
        assert after == files["a.py"].replace(b"first = 1", b"first = 2")
        refused = await edit.TOOL.run({"path": "b.py", "old": "x", "new": "y"}, Workspace(sandbox, TASK, "1"))
        assert refused == Answer("b.py has more than 16 MiB, too much for edit; use the terminal", ok=False)
    finally:
        await host.close()
