"""kill -9 of an environment actor with twenty machines alive: no orphan, and the curriculum issues every slot again."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from secrets import token_hex

import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.launch.guests import overrides
from headrace.messages.rollout import RolloutRequest
from headrace.messages.sandbox import Acquire, Exec, ReadFile, SandboxLost
from headrace.sandboxes.client import Sandboxes
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.slow]

SIZE, PER_STEP, BOUND = 5, 2, 1
SLOTS = SIZE * PER_STEP * (BOUND + 1)
SECTION = c.Environment(
    backend="qemu",
    cache_dir=str(ROOT / ".cache" / "headrace"),
    isolation="episode",
    max_vms=SLOTS,
    judge_share=0,
    warm=0,
)


@asynccontextmanager
async def node(server: Server, folder: Path, run: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """An environment actor as an operator starts one: a process of its own."""
    (folder / "empty.toml").touch()
    where = ["--config", str(folder / "empty.toml"), "--run", run, "--url", server.url]
    words = ["actor", "environment", *where, "--credentials", str(server.credentials), *overrides(SECTION)]
    with (folder / "environment.log").open("ab") as log:
        line = [sys.executable, "-m", "headrace.cli", *words]
        process = await asyncio.to_thread(subprocess.Popen, line, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def machines(process: subprocess.Popen[bytes]) -> list[int]:
    """Handles of the QEMUs that are children of any of its threads."""
    handles = []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("qemu"):
                    handles.append(os.pidfd_open(int(pid)))
    return handles


class SandboxUsers(FakeWorkers):
    """Uses sandboxes like a rollout actor: acquires, calls, and fails the slot when the sandbox is lost."""

    def __init__(self, bus: Bus, run: str, sandboxes: Sandboxes) -> None:
        super().__init__(bus, run, groups_per_step=PER_STEP, bound=BOUND)
        self.sandboxes = sandboxes
        self.at_work = asyncio.Semaphore(0)
        self.all_solved = asyncio.Event()
        self.lost: list[tuple[str, int, int, str, str]] = []
        self.solved: list[tuple[str, int, int]] = []
        self.answer = self.fill

    async def fill(self, request: RolloutRequest) -> None:
        names = {"run": self.run, "lane": "train", "group": request.group, "role": "rollout", "isolation": "episode"}
        wanted = Acquire(**names, slot=request.slot, attempt=request.attempt, files={"a": b"1"})  # type: ignore[arg-type]
        try:
            sandbox = await self.sandboxes.acquire(wanted)
            if request.attempt == 0:
                self.at_work.release()
                await sandbox.call(Exec(argv=("sleep", "300"), timeout_s=300.0))
            assert (await sandbox.call(ReadFile(path="a"))).data == b"1"
        except SandboxLost as lost:
            self.lost.append((request.group, request.slot, request.attempt, type(lost).__name__, str(lost)))
            await self.fail(request, "sandbox_lost")
            return
        await self.sandboxes.release(sandbox)
        await self.solve(request)
        self.solved.append((request.group, request.slot, request.attempt))
        if len(self.solved) == SLOTS:
            self.all_solved.set()


@pytest.mark.timeout(300)
async def test_no_machine_outlives_its_actor_and_every_slot_comes_again(
    server: Server, connect: Connect, tmp_path: Path
) -> None:
    run = f"r{token_hex(4)}"
    recipe = c.Curriculum(group_size=SIZE, groups_per_step=PER_STEP, staleness=BOUND, steps=3)
    config = c.Config(curriculum=recipe, evaluation=c.Evaluation(before=False, after=False))
    handlers = SandboxUsers(await connect(), run, Sandboxes(await connect("rollout"), 60.0))
    async with living(Curriculum, config, await connect("curriculum"), run) as curriculum:
        async with node(server, tmp_path, run) as process:
            await handlers.start()
            await handlers.serve(0)
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(SLOTS):
                    await handlers.at_work.acquire()
            watches = machines(process)
            process.kill()
            for watch in watches:
                assert select.select([watch], [], [], 20)[0], "a QEMU outlived its actor"
                os.close(watch)
        async with node(server, tmp_path, run):
            async with asyncio.timeout(PATIENCE_S):
                await handlers.all_solved.wait()
            await handlers.closed(PER_STEP * (BOUND + 1))
        assert curriculum.state.problems == []
    await handlers.stop()
    assert len(watches) == SLOTS == len(handlers.lost), "\n".join(map(str, sorted(handlers.lost)))
    assert len(handlers.solved) == SLOTS and {attempt for _, _, attempt in handlers.solved} == {1}
