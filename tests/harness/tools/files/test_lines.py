"""read_file and search show what the other tools change: read, edit, read again, in a real sandbox."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import Environment
from headrace.harness.scripted import written
from headrace.harness.tools.base import Answer, Workspace
from headrace.harness.tools.registry import TOOLS
from headrace.messages.sandbox import Exec, OpResult, PullTree, ReadFile, Sandbox, WriteFiles
from headrace.messages.tasks import Task, TaskRef
from headrace.tasks.diff import pull
from headrace.tasks.local import LocalFiles
from headrace.vmhost.guest import lines, names
from headrace.vmhost.node.host import Host
from tests.support import hosts
from tests.support.records import of
from tests.vmhost.guest.test_lines import files

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=2_000)
TASK = of(Task, ref=TaskRef("s", "t"), template="light")
ODD = ("new\nline", " lead", "trail ", "bidi\u202etxt", "nb\xa0sp", "c\x01", "a:1:b", "x-2-y", "back\\nslash", '"q"')
NOT_UTF8 = "\udcff\udcfe.txt"


class Player:
    """One sandbox and a loop that its calls run in."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sandbox: Sandbox) -> None:
        self.loop, self.sandbox, self._calls = loop, sandbox, 0
        self.memory: dict[str, str] = {}

    def tool(self, name: str, **arguments: str) -> Answer:
        self._calls += 1
        workspace = Workspace(self.sandbox, TASK, f"c{self._calls}", memory=self.memory, cap=1 << 20)
        return self.loop.run_until_complete(TOOLS.get(name).run(arguments, workspace))

    def op(self, op: Any) -> OpResult:
        self._calls += 1
        return self.loop.run_until_complete(self.sandbox.call(op, f"o{self._calls}"))


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    loop = asyncio.new_event_loop()
    host = loop.run_until_complete(Host.open(Environment(backend="process")))
    sandbox = loop.run_until_complete(host.acquire(hosts.ask(0, group="lines", files={})))
    yield Player(loop, sandbox)
    loop.run_until_complete(host.close())
    loop.close()


def numbered(output: str) -> list[str]:
    return [line.partition(":")[2] for line in output.split("\n")] if output else []


def check_edits(player: Player, data: bytes, draw: st.DataObject) -> None:
    """One line is changed by what was read of it; every other byte is equal."""
    player.op(WriteFiles(files={"a.py": data}))
    text = lines.parse(data)
    read = numbered(player.tool("read_file", path="a.py").output)
    assert read == lines.shown_lines(data)
    if not read:
        return
    at = draw.draw(st.integers(0, len(read) - 1))
    how = draw.draw(st.sampled_from(["edit_file", "anchor", "old"]))
    new = "NEW"
    if how == "edit_file":
        answer = player.tool("edit_file", path="a.py", lines=str(at + 1), text=new)
    elif how == "anchor":
        anchor = player.tool("read_file", path="a.py", anchors="true", lines=str(at + 1)).output.partition(":")[0]
        answer = player.tool("edit", path="a.py", at=anchor, new=new)
    else:
        new = read[at] + "NEW"
        answer = player.tool("edit", path="a.py", old=read[at], new=new)
    after = player.op(ReadFile(path="a.py")).data
    if not answer.ok:
        assert how == "old" and after == data
        assert not read[at].strip() or "\n".join(read).count(read[at]) > 1, answer.output
        return
    end = text.lines[at][len(lines.body(text.lines[at])) :]
    line = lines.body(text.lines[at]) + "NEW" if how == "old" else "NEW"
    expected = text._replace(lines=[*text.lines[:at], line + end, *text.lines[at + 1 :]])
    assert after == expected.data
    assert numbered(player.tool("read_file", path="a.py").output) == [*read[:at], new, *read[at + 1 :]]
    if b"\0" not in after[:1024] or after.startswith(lines.UTF16):
        assert player.tool("search", query="NEW$", glob="a.py").output == f"a.py\n{at + 1}:{new}"


@FEW
@given(files(), st.data())
def test_an_edit_changes_the_line_that_was_read(player: Player, data: bytes, draw: st.DataObject) -> None:
    check_edits(player, data, draw)


@pytest.mark.slow
@MANY
@given(files(), st.data())
def test_many_edits_change_the_line_that_was_read(player: Player, data: bytes, draw: st.DataObject) -> None:
    check_edits(player, data, draw)


@FEW
@given(files(), files())
def test_a_scripted_policy_makes_exactly_the_solution(before: bytes, after: bytes) -> None:
    sandbox = LocalFiles({"a.py": before})
    calls = written("a.py", before, after)
    for number, (name, arguments) in enumerate(calls):
        if name == "terminal":
            return  # checked in a real sandbox below
        done = asyncio.run(TOOLS.get(name).run(arguments, Workspace(sandbox, TASK, str(number))))
        assert done.ok, done.output
    assert sandbox.files["a.py"] == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\x0cb\nc\n", b"a\x0cb\nd\n"),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"a\n", b"a"),
        (b"", b"\n\nx"),
        (b"a\n", b"\xff\n" * 100_000),
        (b"a\n", b""),
        (b"a\nc\n", b"a\n\nc\n"),
    ],
)
def test_the_oracle_s_calls_write_the_solution_s_bytes(player: Player, before: bytes, after: bytes) -> None:
    player.op(WriteFiles(files={"sub dir/a.txt": before}))
    for name, arguments in written("sub dir/a.txt", before, after):
        done = player.tool(name, **arguments)
        assert done.ok, done.output
    assert player.op(ReadFile(path="sub dir/a.txt", limit=1 << 24)).data == after


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a  \nb\nc\t\n", "a\nb\nc", "a\nB\nc", b"a  \nB\nc\t\n"),
        (b"a  \r\nb \r\nc\n", "a\nb\nc", "a\nB\nc", b"a  \r\nB \r\nc\n"),
        (b"  a\r\n    b\n  c\r\n", "a\n  b\nc", "a\n  x\n  y\nc", b"  a\r\n    x\n    y\n  c\r\n"),
        (
            b"x = \xe2\x80\x9ca\xe2\x80\x9d\ny = 1\n",
            'x = "a"\ny = 1',
            'x = "a"\ny = 2',
            b"x = \xe2\x80\x9ca\xe2\x80\x9d\ny = 2\n",
        ),
        (b"a \nb \nc \n", "a\nb\n", "", b"c \n"),
        (b"a \nb \n", "a\nb", "n\na\nb", b"n\na \nb \n"),
        (b"a \nb ", "a\nb", "a\nb\nn", b"a \nb \nn"),
        (b"a\rb\xff\n", "a\\rb\\xff", "c\\rb\\xff", b"c\rb\xff\n"),
        (b"\xef\xbb\xbfa\n", "a", "b", b"\xef\xbb\xbfb\n"),
        (b"a\r\nb\n", "a\nb", "a\nx\nb", b"a\r\nx\nb\n"),
    ],
)
def test_an_edit_rewrites_nothing_outside_of_what_changes(
    player: Player, before: bytes, old: str, new: str, after: bytes
) -> None:
    player.op(WriteFiles(files={"a.py": before}))
    player.memory.clear()
    answer = player.tool("edit", path="a.py", old=old, new=new)
    assert answer.ok, answer.output
    assert player.op(ReadFile(path="a.py")).data == after


def test_an_escape_is_not_written_for_the_byte_that_it_shows(player: Player) -> None:
    player.op(WriteFiles(files={"a.py": b"x\xffy\nx\\xffy\n"}))
    player.memory.clear()
    assert "2 places" in player.tool("edit", path="a.py", old="x\\xffy", new="z").output
    player.op(WriteFiles(files={"a.py": b"x\xffy\n"}))
    refused = player.tool("edit", path="a.py", old="x\\xffy", new="z\\xffw")
    assert not refused.ok and player.op(ReadFile(path="a.py")).data == b"x\xffy\n"


def test_every_tool_takes_back_the_name_that_another_shows(player: Player) -> None:
    script = "import os, sys\nos.mkdir('odd')\nfor name in map(bytes.fromhex, sys.argv[1:]):\n"
    script += "    open(b'odd/' + name, 'w').write('one\\ntwo\\n')\n"
    encoded = [name.encode("utf-8", "surrogateescape").hex() for name in (*ODD, NOT_UTF8)]
    assert player.op(Exec(argv=("python3", "-c", script, *encoded))).ok
    listed = player.tool("list_files", glob="odd/**").output.split("\n")
    assert {names.raw(path) for path in listed} == {f"odd/{name}" for name in (*ODD, NOT_UTF8)}
    hits = player.tool("search", query="two", glob="odd/**").output.split("\n")
    assert hits[::2] == listed and set(hits[1::2]) == {"2:two"}
    for path in listed:
        assert player.tool("read_file", path=path).output == "1:one\n2:two"
        assert player.tool("edit_file", path=path, lines="2", text="three").ok
        assert player.tool("edit", path=path, old="one", new="1").ok
        assert player.op(PullTree(patterns=("odd/**",))).files[path] == b"1\nthree\n"
        assert player.tool("write_file", path=path, text="x").ok
        assert player.tool("delete_file", path=path).ok
    assert player.tool("list_files", glob="odd/**").output == "no files"


def test_an_untouched_file_is_in_no_diff() -> None:
    async def run() -> None:
        task = of(
            Task,
            ref=TaskRef("s", "t"),
            files={f"d/{name}": name.encode() for name in ODD} | {"d/changed\n": b""},
            allowed=("d/**",),
        )
        host = await Host.open(Environment(backend="process"))
        try:
            sandbox = await host.acquire(hosts.ask(0, group="names", files=task.files))
            assert (await pull(sandbox, task, "none")).changes.diff == {}
            make = "import os; open(b'd/\\xff', 'w').write('n'); open('d/changed\\n', 'w').write('c')"
            await sandbox.call(Exec(argv=("python3", "-c", make)))
            changes = (await pull(sandbox, task, "some")).changes
            assert (changes.diff, changes.deleted, changes.touched) == (
                {"d/changed\n": b"c", "d/\\xff": b"n"},
                (),
                (),
            )
            # A judge opens its sandbox with these files.
            judged = await host.acquire(hosts.ask(1, group="names", files=task.files | changes.diff))
            assert (await pull(judged, task, "judge")).changes.diff == changes.diff
        finally:
            await host.close()

    asyncio.run(run())
