"""Links, modes and empty folders of a workspace without an image: made with the repository, read as changes."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.config import Environment
from headrace.judging.candidates import repository, repository_entries
from headrace.judging.rules import pushed
from headrace.messages.sandbox import Acquire, Exec, FilesRefused, PullTree, Sandbox
from headrace.messages.tasks import Change, Oracle, Task, TaskRef, TestPlan
from headrace.tasks.diff import WorkspaceTree, diff, pull
from headrace.tasks.sandboxes import for_task
from headrace.vmhost.node.host import Host
from tests.support.hosts import CACHE
from tests.support.judging import trajectory
from tests.support.records import of

pytestmark = pytest.mark.anyio
REF, PLAN = TaskRef("s", "1"), TestPlan(kind="command", argv=("true",))
ENTRIES = (
    Change("d/empty", "folder", 0o755),
    Change("d/run \n", "file", 0o755),
    Change("link", "link", 0o777, "d/run \n"),
)
TASK = of(Task, ref=REF, files={"d/run \n": b"1\n", "plain": b"2\n"}, entries=ENTRIES, tests=PLAN)
REQUEST = Acquire(run="r", lane="eval", role="judge", group="g", slot=0, attempt=0, isolation="episode")


@pytest.fixture(params=["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend=request.param, max_vms=4, cache_dir=CACHE, warm=0))
    yield opened
    await opened.close()


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.call(Exec(argv=("sh", "-ec", script)))
    assert done.ok, done
    return done.stdout


async def test_a_workspace_begins_with_its_entries_and_an_untouched_one_has_no_changes(host: Host) -> None:
    sandbox = await host.acquire(for_task(REQUEST, TASK))
    assert await sh(sandbox, "test -x link; test ! -x plain; test -d d/empty; readlink link") == "d/run \n\n"
    pulled = await pull(sandbox, TASK, "c")
    assert pulled.digest == pushed(TASK)
    assert pulled.changes == msgspec.structs.replace(pulled.changes, diff={}, deleted=(), changes=(), touched=())
    tree = await sandbox.call(PullTree())
    assert [change.path for change in tree.changes] == ["d/empty", "d/run \\n", "link"], "paths as tools show them"


async def test_changes_of_modes_and_links_reach_the_judge(host: Host) -> None:
    sandbox = await host.acquire(for_task(REQUEST, TASK))
    await sh(
        sandbox,
        "chmod +x plain; chmod -x d/run*; rmdir d/empty; mkdir new; ln -sfn plain link; rm -rf .git; mkdir .git",
    )
    changes = (await pull(sandbox, TASK, "c")).changes
    assert changes.diff == {"plain": b"2\n", "d/run \n": b"1\n"} and changes.deleted == ("d/empty",)
    assert changes.changes == (
        Change("d/empty", "gone"),
        Change("d/run \n", "file", 0o644),
        Change("link", "link", 0o777, "plain"),
        Change("new", "folder", 0o755),
        Change("plain", "file", 0o755),
    )
    made = trajectory("r", "g", changes.diff, deleted=changes.deleted, changes=changes.changes)
    oracle = Oracle(ref=REF, hidden={}, tests=PLAN, expected=(), solution={})
    files = repository(TASK, oracle, made.diff, made.deleted)
    judged = for_task(REQUEST, TASK, files, repository_entries(TASK, oracle, made, files))
    again = await host.acquire(msgspec.structs.replace(judged, slot=1))
    assert (
        await sh(again, "test -x plain; test ! -x d/run*; test ! -e d/empty; test -d new; readlink link") == "plain\n"
    )


def test_the_judges_files_and_the_tree_itself_come_before_a_candidates_entries() -> None:
    hidden = {"tests/t.py": b"t", "conf": b"c"}
    gone = (Change("tests/old.py", "gone"), Change("tests/run", "file", 0o755))
    oracle = Oracle(ref=REF, hidden=hidden | {"tests/run": b"r"}, tests=PLAN, expected=(), solution={}, entries=gone)
    forged = (
        Change("tests", "link", 0o777, "/tmp"),
        Change("conf", "link", 0o777, "elsewhere"),
        Change("tests/old.py", "file", 0o755),
        Change("/etc/passwd", "link", 0o777, "x"),
        Change(".headrace/verify.sh", "link", 0o777, "x"),
        Change(".headrace", "link", 0o777, "d"),
        Change("d", "link", 0o777, "plain"),
        Change("missing", "file", 0o755),
        Change("suid", "file", 0o4755),
        Change("odd", "other"),
    )
    made = trajectory("r", "g", {"tests/old.py": b"o", "suid": b"s"}, deleted=(), changes=forged)
    files = repository(TASK, oracle, made.diff, made.deleted)
    assert "tests/old.py" not in files and files["tests/t.py"] == b"t"
    entries = repository_entries(TASK, oracle, made, files)
    assert entries == [*ENTRIES, Change("suid", "file", 0o755), Change("tests/run", "file", 0o755)]


async def test_entries_that_no_workspace_can_hold_are_refused(host: Host) -> None:
    for entry in (Change("/etc/x", "folder", 0o755), Change("a/../../x", "link", 0o777, "y")):
        with pytest.raises(FilesRefused, match="expected a path without"):
            await host.acquire(msgspec.structs.replace(REQUEST, entries=(entry,)))
    with pytest.raises(FilesRefused, match="has a mode of 'a' and no such file"):
        await host.acquire(msgspec.structs.replace(REQUEST, entries=(Change("a", "file", 0o755),)))


def test_what_the_change_of_a_content_implies_is_no_change_of_an_entry() -> None:
    before = WorkspaceTree({"a": b"1", "d/x": b"2"}, (Change("a", "file", 0o755), Change("l", "link", 0o777, "a")))
    after = WorkspaceTree({"a": b"3", "l": b"4"}, (Change("a", "file", 0o755), Change("d", "folder", 0o755)))
    changes, entered = diff(before, after, ("**",))
    assert changes == ({"a": b"3", "l": b"4"}, ("d/x",), ())
    assert entered == (Change("d", "folder", 0o755), Change("l", "file", 0o644))
    assert diff(before, after, ("a",))[0].touched == ("d", "d/x", "l")
