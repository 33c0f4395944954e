"""Artifacts go from one sandbox to another as they are, without what lies outside of them."""

import stat
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.config import Environment
from headrace.judging import artifacts
from headrace.judging.artifacts import NotCollected, collect, excluded
from headrace.messages.sandbox import Acquire, Exec, ReadFile, Sandbox, WriteFiles
from headrace.messages.tasks import Artifact
from headrace.vmhost.node.host import Host

pytestmark = pytest.mark.anyio


@pytest.fixture
async def boxes() -> AsyncIterator[tuple[Sandbox, Sandbox]]:
    host = await Host.open(Environment(backend="process", max_vms=2))
    fields: dict[str, Any] = {"run": "r", "lane": "eval", "role": "judge", "slot": 0, "attempt": 0}
    both = [await host.acquire(Acquire(**fields, group=group, isolation="episode")) for group in "ab"]
    yield both[0], both[1]
    await host.close()


async def moved(boxes: tuple[Sandbox, Sandbox], *listed: Artifact) -> str:
    """Every entry of the second sandbox after the move, with modes and targets."""
    for archive in await collect(boxes[0], listed):
        assert (await boxes[1].call(archive)).ok
    shown = await boxes[1].call(Exec(argv=("find", ".", "-mindepth", "1", "-printf", "%P %m %y %l;")))
    return " ".join(sorted(entry.strip() for entry in shown.stdout.split(";") if entry.strip()))


async def test_files_folders_modes_and_inner_links_arrive_and_nothing_else(boxes: tuple[Sandbox, Sandbox]) -> None:
    await boxes[0].call(
        WriteFiles(files={"app/out/a": b"1", "app/out/deep/b": b"2", "app/run": b"#", "app/left": b"3"})
    )
    script = "chmod 755 app/run; ln -s deep/b app/out/inner; ln -s ../left app/out/up; ln -s /etc app/out/etc"
    await boxes[0].call(Exec(argv=("sh", "-c", f"{script}; mkfifo app/out/pipe; ln app/out/a app/out/twin")))
    listed = (Artifact(path="/app/out"), Artifact(path="/app/run"), Artifact(path="/app/missing"))
    assert await moved(boxes, *listed) == (
        "app 755 d app/out 755 d app/out/a 644 f app/out/deep 755 d app/out/deep/b 644 f app/out/inner 777 l deep/b "
        "app/out/twin 644 f app/run 755 f"
    )
    assert (await boxes[1].call(ReadFile(path="app/out/twin"))).data == b"1"


async def test_a_link_in_place_of_a_file_gives_the_content_that_it_has_there(boxes: tuple[Sandbox, Sandbox]) -> None:
    await boxes[0].call(WriteFiles(files={"app/mine": b"42"}))
    await boxes[1].call(WriteFiles(files={"app/mine": b"the answer"}))
    await boxes[0].call(Exec(argv=("ln", "-s", "mine", "app/result")))
    await moved(boxes, Artifact(path="/app/result"))
    read = await boxes[1].call(ReadFile(path="app/result"))
    assert read.data == b"42"
    kind = await boxes[1].call(Exec(argv=("stat", "-c", "%f", "app/result")))
    assert stat.S_ISREG(int(kind.stdout, 16))


async def test_a_link_in_place_of_a_folder_brings_nothing(boxes: tuple[Sandbox, Sandbox]) -> None:
    await boxes[0].call(WriteFiles(files={"app/x": b"1"}))
    await boxes[0].call(Exec(argv=("sh", "-c", "ln -s /etc app/out; ln -s /no/such/file app/dangling")))
    assert await moved(boxes, Artifact(path="/app/out"), Artifact(path="/app/dangling")) == "app 755 d app/out 755 d"


async def test_excluded_paths_stay(boxes: tuple[Sandbox, Sandbox]) -> None:
    files = {"app/a.py": b"", "app/a.pyc": b"", "app/node_modules/x/y": b"", "app/sub/node_modules/z": b""}
    await boxes[0].call(WriteFiles(files=files))
    seen = await moved(boxes, Artifact(path="/app", exclude=("node_modules", "*.pyc")))
    assert seen == "app 755 d app/a.py 644 f app/sub 755 d"


async def test_an_artifact_that_is_too_large_is_the_candidates_fault(
    boxes: tuple[Sandbox, Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "LARGEST", 4096)
    await boxes[0].call(WriteFiles(files={"app/large": b"x" * 5000}))
    with pytest.raises(NotCollected, match="app/large: more than"):
        await collect(boxes[0], [Artifact(path="/app/large")])


def test_a_pattern_matches_from_any_folder_on() -> None:
    assert excluded("a/b/c.txt", ["b"]) and excluded("a/b/c.txt", ["b/*.txt"]) and excluded("a/b/c.txt", ["./a"])
    assert not excluded("a/b/c.txt", ["c"]) and not excluded("ab/c", ["b"])
