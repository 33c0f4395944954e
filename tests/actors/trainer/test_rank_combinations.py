"""Settings of several ranks together: over a checkpoint, the versions of undisturbed ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages.training import StepDone
from tests.actors.trainer.test_nodes import free_port, joined
from tests.actors.trainer.test_rank_formats import Kind, Ranks, Run
from tests.support.actors import living
from tests.support.keys import as_writers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 6


def combined(run: Run, ranks: Ranks, **trainer: Any) -> Config:
    """Recomputed activations, moments in bfloat16, a KL term with its reference, and two updates of each batch."""
    made: Config = run.settings(ranks, "bfloat16", checkpoint_every=3, **trainer)
    algorithm = msgspec.structs.replace(made.algorithm, kl_weight=0.05, minibatches=2, weighting="decoupled")
    numerics = msgspec.structs.replace(made.numerics, recompute=True)
    return msgspec.structs.replace(made, algorithm=algorithm, numerics=numerics)


async def versions(
    server: Server, folder: Path, kind: Kind, settings: Sequence[tuple[Ranks, dict[str, Any]]]
) -> tuple[list[str], list[StepDone]]:
    """Hashes of all versions and the records of their steps: with one division of the work after the other, each with
    its settings of the trainer. The first life of two ends two steps behind its checkpoint."""
    folder.mkdir()
    async with await as_writers(server.url, server.credentials) as admin:
        run = Run(admin, folder, kind)
        first = 0
        for life, (ranks, trainer) in enumerate(settings, 1):
            made = combined(run, ranks, **trainer)
            last = STEPS if life == len(settings) else STEPS - 1
            with joined(folder, made, "--once"):
                async with (
                    await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
                    living(Trainer, made, bus, run.feeder.run),
                ):
                    for number in range(first, last):
                        await run.feeder.batch(number)
                    await run.feeder.version(last)
            first = last
        done = [record for record in await run.feeder.steps() if isinstance(record, StepDone)]
    return [run.feeder.hashes[number] for number in range(STEPS + 1)], done


def assert_every_step_once(done: Sequence[StepDone]) -> None:
    assert [(record.step, record.incarnation) for record in done] == [(step, 0) for step in range(STEPS)]
    assert all(record.max_abs_dlp == 0.0 and record.exact and record.rescored_tokens for record in done), "Law 5"


@pytest.mark.parametrize(
    ("kind", "several"),
    [
        (Kind("dense", "float32"), Ranks(4, context=2)),
        (Kind("mixture", "bfloat16"), Ranks(4, context=2)),
        (Kind("mixture", "bfloat16"), Ranks(4, expert=2, context=2)),
    ],
    ids=str,
)
async def test_everything_at_once_and_resumed_with_the_reference(
    server: Server, tmp_path: Path, kind: Kind, several: Ranks
) -> None:
    want, _ = await versions(server, tmp_path / "whole", kind, [(several, {})])
    got, done = await versions(server, tmp_path / "ranks", kind, [(several, {}), (several, {})])
    assert got == want
    assert_every_step_once(done)


@pytest.mark.parametrize("kind", [Kind("dense", "bfloat16"), Kind("mixture", "mxfp8")], ids=str)
async def test_context_ranks_and_formats_over_two_nodes(server: Server, tmp_path: Path, kind: Kind) -> None:
    nodes = {"node_ranks": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    several = Ranks(4, context=2)
    want, _ = await versions(server, tmp_path / "whole", kind, [(several, {})])
    got, done = await versions(server, tmp_path / "nodes", kind, [(several, nodes), (several, nodes)])
    assert got == want
    assert_every_step_once(done)
