"""Jobs beside calls, cancelling, and trees as archives: alike on both backends."""

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import (
    Acquire,
    Cancel,
    Exec,
    FeedJob,
    FollowJob,
    ListFiles,
    OpResult,
    PullTar,
    PushTar,
    ReadFile,
    StartJob,
    StopJob,
)
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.archives import file, folder, layer, link
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")


@pytest.fixture(scope="module", params=["process", pytest.param("qemu", marks=pytest.mark.vm)])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[VmSandbox]:
    host = await Host.open(Environment(backend=request.param, cache_dir=CACHE, warm=0))
    asked = Acquire(run="r", lane="train", role="rollout", group="j", slot=0, attempt=0, isolation="episode")
    yield await host.acquire(asked)
    await host.close()


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


async def start(sandbox: VmSandbox, script: str, **how: object) -> int:
    started = await sandbox.call(StartJob(argv=sh(script), **how))  # type: ignore[arg-type]
    assert started.ok and started.running and started.job
    return started.job


async def whole(sandbox: VmSandbox, job: int, **how: object) -> OpResult:
    """Follow a job to its end; all of its output."""
    out, err = "", ""
    while True:
        piece = await sandbox.call(FollowJob(job=job, wait_s=20.0, **how))  # type: ignore[arg-type]
        out, err = out + piece.stdout, err + piece.stderr
        if not piece.running:
            return OpResult(ok=piece.ok, error=piece.error, code=piece.code, stdout=out, stderr=err)


async def test_a_job_runs_beside_calls_and_is_followed(sandbox: VmSandbox) -> None:
    job = await start(
        sandbox, "echo begun; while ! test -e go; do sleep 0.02; done; echo done >&2; exit 5", env={"A": "1"}
    )
    assert (await sandbox.call(FollowJob(job=job))).stdout == "begun\n"
    waiting = asyncio.create_task(whole(sandbox, job))
    assert (await sandbox.call(Exec(argv=sh("touch go; echo beside")))).stdout == "beside\n"
    ended = await waiting
    assert (ended.ok, ended.code, ended.stderr, ended.error) == (False, 5, "done\n", "exit code 5")
    again = await sandbox.call(FollowJob(job=job))
    assert not again.running and again.code == 5
    nobody = await sandbox.call(FollowJob(job=999_999))
    assert nobody.error == "there is no job 999999"
    quiet = await start(sandbox, "sleep 60")
    nothing = await sandbox.call(FollowJob(job=quiet, wait_s=0.01))
    assert nothing.running and not nothing.stdout
    await sandbox.call(StopJob(job=quiet))
    assert (await whole(sandbox, quiet)).code == -9


async def test_output_that_nobody_takes_makes_its_writer_wait_and_none_is_lost(sandbox: VmSandbox) -> None:
    job = await start(sandbox, "yes line | head -n 40000; echo end > end", output_cap=4096)  # more than a pipe holds
    await sandbox.call(FollowJob(job=job, limit=1))
    assert not (await sandbox.call(ReadFile(path="end"))).ok
    ended = await whole(sandbox, job)
    assert ended.ok and "l" + ended.stdout == "line\n" * 40000
    assert (await sandbox.call(ReadFile(path="end"))).data == b"end\n"


async def test_input_goes_on_until_it_is_closed(sandbox: VmSandbox) -> None:
    job = await start(sandbox, "cat", stdin=b"one\n", open_input=True)
    assert (await sandbox.call(FollowJob(job=job))).stdout == "one\n"
    assert (await sandbox.call(FeedJob(job=job, data=b"two\n"))).ok
    assert (await sandbox.call(FollowJob(job=job))).stdout == "two\n"
    await sandbox.call(FeedJob(job=job, last=True))
    assert (await whole(sandbox, job)).ok
    assert not (await sandbox.call(FeedJob(job=job, data=b"x"))).ok
    closed = await start(sandbox, "cat; echo over")
    assert (await whole(sandbox, closed)).stdout == "over\n"


async def test_a_terminal_is_one(sandbox: VmSandbox) -> None:
    job = await start(sandbox, "test -t 0 && test -t 1 && stty size; read x; echo got $x", terminal=True)
    await sandbox.call(FeedJob(job=job, data=b"typed\n"))
    ended = await whole(sandbox, job)
    assert ended.ok and "24 80" in ended.stdout and "got typed" in ended.stdout
    cat = await start(sandbox, "cat", terminal=True)
    await sandbox.call(FeedJob(job=cat, last=True))
    assert (await whole(sandbox, cat)).ok


async def test_a_call_under_way_is_cancelled_by_its_id(sandbox: VmSandbox) -> None:
    running = asyncio.create_task(
        sandbox.call(Exec(argv=sh("echo x > began; sleep 60 & sleep 60"), timeout_s=60.0), "long")
    )
    while not (await sandbox.call(ReadFile(path="began"))).ok:
        pass
    assert (await sandbox.call(Cancel(call_id="long"))).ok
    ended = await running
    assert (ended.ok, ended.error, ended.code, ended.timed_out) == (False, "it was cancelled", -9, False)
    late = await sandbox.call(Cancel(call_id="long"))
    assert late.error == "nothing runs under call id 'long'"
    other = await sandbox.call(Exec(argv=("id",), user="somebody"))
    assert other.error == "there is no user 'somebody' here"


async def test_trees_keep_modes_and_links(sandbox: VmSandbox) -> None:
    tree = layer(
        [
            folder("t", mode=0o750),
            folder("t/locked", mode=0o500),
            file("t/locked/a", b"a", mode=0o640, mtime=1_500_000_000),
            file("t/run", b"#!/bin/sh\n", mode=0o755),
            link("t/out", "/etc/hostname"),
            link("t/hard", "t/run", tarfile.LNKTYPE),
            file("t/new\nline", b"\x00\xff"),
        ]
    )
    assert (await sandbox.call(PushTar(data=tree, path="deep/er"))).ok
    assert (await sandbox.call(PushTar(data=tree, path="deep/er"))).ok, "what is there gives way"
    back = await sandbox.call(PullTar(path="deep/er"))
    with tarfile.open(fileobj=io.BytesIO(back.data)) as tar:
        members = {member.name: member for member in tar}
        data = tar.extractfile("t/new\nline")
        assert data is not None and data.read() == b"\x00\xff"
    assert {name: member.mode for name, member in members.items() if not member.issym()} == {
        "t": 0o750,
        "t/locked": 0o500,
        "t/locked/a": 0o640,
        "t/run": 0o755,
        "t/hard": 0o755,
        "t/new\nline": 0o644,
    }
    assert members["t/locked/a"].mtime == 1_500_000_000 and members["t/out"].linkname == "/etc/hostname"
    assert members["t/run"].islnk() or members["t/hard"].islnk()
    assert "deep/er/t/new\\nline" in (await sandbox.call(ListFiles())).stdout.splitlines()
    one = await sandbox.call(PullTar(path="deep/er/t/run"))
    assert one.ok and len(one.data) > 512


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (layer([file("../x", b"x")]), "may not leave its folder"),
        (layer([file("/x", b"x")]), "may not leave its folder"),
        (b"nonsense" * 100, "expected a tar archive"),
        (layer([file("a", b"x" * 5000)])[:2000], "damaged"),
    ],
)
async def test_archives_that_are_none_are_refused(sandbox: VmSandbox, data: bytes, error: str) -> None:
    refused = await sandbox.call(PushTar(data=data))
    assert not refused.ok and error in refused.error
    assert not os.path.exists("/x")


async def test_a_tree_that_is_too_large_is_not_pulled(sandbox: VmSandbox) -> None:
    await sandbox.call(Exec(argv=sh("mkdir -p big; head -c 300000 /dev/zero > big/file")))
    assert "more than" in (await sandbox.call(PullTar(path="big", limit=200_000))).error
    assert "No such file" in (await sandbox.call(PullTar(path="absent"))).error


async def test_a_limit_beyond_all_clocks_is_a_limit(sandbox: VmSandbox) -> None:
    done = await sandbox.call(Exec(argv=("echo", "fine"), timeout_s=1e15))
    assert (done.stdout, done.timed_out) == ("fine\n", False)
