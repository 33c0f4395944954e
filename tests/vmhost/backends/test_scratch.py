"""The folder of a host's sandboxes: it outlives sweeps from other PID namespaces, and goes with its host."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.backends.process import ProcessBackend
from headrace.vmhost.backends.scratch import Scratch, sweep
from headrace.vmhost.errors import VmhostError
from tests.support.paths import ROOT

SWEEP = "from headrace.vmhost.backends.scratch import sweep; sweep()"
HOLD = "from headrace.vmhost.backends.scratch import Scratch; print(Scratch().path, flush=True); input()"


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace takes root")
def test_a_sweep_in_another_pid_namespace_leaves_the_folder_of_a_living_host() -> None:
    scratch = Scratch()
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", SWEEP]
    subprocess.run(elsewhere, cwd=ROOT, check=True)
    assert scratch.exists()
    scratch.remove()
    assert not scratch.exists()


def test_the_folder_of_a_killed_host_is_removed_by_the_next() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with host:
        assert host.stdout is not None
        folder = Path(host.stdout.readline().strip())
        (folder / "1").mkdir()
        sweep()
        assert folder.is_dir(), "its host runs"
        host.kill()
    sweep()
    assert not folder.exists()
    assert folder.parent == Path(tempfile.gettempdir())


@pytest.mark.anyio
async def test_a_host_whose_folder_was_removed_says_so() -> None:
    backend = await ProcessBackend.open(Environment(backend="process"), lambda *_, **__: None)
    try:
        machine = await backend.machine("", SandboxLimits())
        shutil.rmtree(backend._scratch.path)
        with pytest.raises(SandboxLost, match=r"was removed while this host uses it"):
            await machine.open(0)
        with pytest.raises(VmhostError, match=r"was removed while this host uses it; start the actor again"):
            await backend.machine("", SandboxLimits())
    finally:
        await backend.close()


def test_a_folder_that_a_sweep_removed_at_once_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    removed: list[str] = []

    def swept(prefix: str) -> str:
        path = make(prefix=prefix)
        if not removed:
            removed.append(path)
            os.rmdir(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    scratch = Scratch()
    try:
        assert scratch.exists() and removed and scratch.path != removed[0]
    finally:
        scratch.remove()
