"""One bundle in a root of Debian, of busybox alone, and without any program: it needs nothing of them."""

from pathlib import Path

import pytest

from headrace.harnesses import bundles
from headrace.messages.rollout import Trajectory
from headrace.vmhost.backends.container.backend import unavailable
from tests.conftest import Connect
from tests.support import small_harness
from tests.support.harness_images import CACHE, ROOTS, SUITE, TURNS, image_task
from tests.support.harness_run import harness_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

BACKENDS = [
    pytest.param("container", marks=pytest.mark.skipif(bool(unavailable()), reason="no containers here")),
    pytest.param("qemu", marks=pytest.mark.vm),
]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_bundle_runs_in_any_root(connect: Connect, tmp_path: Path, root: str, backend: str) -> None:
    image_task(root, tmp_path)
    own = small_harness.with_interpreter()
    bundles.make(CACHE, own)
    run = f"r-{root}-{backend}"
    async with harness_run(connect, tmp_path, run, "small", TURNS, own=own, backend=backend) as there:
        made = await there.attempt(suite=SUITE, id="1", isolation="episode")
        assert isinstance(made, Trajectory), made
        assert made.outcome == "finished" and len(made.turns) == 2, made
        result = made.turns[0].results
        if root == "distroless":
            assert made.diff == {} and "/bin/sh" in result[0].output
        else:
            assert (await there.score()).verdict == "passed" and made.touched == ()
