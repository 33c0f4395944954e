"""A trajectory's tool calls in a fresh sandbox: the same answers, and every other one is told apart."""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.config import Config, Environment
from headrace.harness.loop import run_episode
from headrace.harness.scripted import ScriptedEngine, script
from headrace.messages.rollout import RolloutRequest, ToolCall, ToolResult, Trajectory
from headrace.messages.sandbox import Acquire, PullTree
from headrace.messages.subjects import TRAJ
from headrace.rendering import schemas
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.replay.calls import normal, rerun
from headrace.tasks import open_suite
from headrace.vmhost.node.host import Host
from tests.support import records
from tests.support.keys import as_writers
from tests.support.paths import ROOT


async def _play(environment: Environment) -> Trajectory:
    """The oracle's way through a task, in a sandbox."""
    suite = open_suite("generated/heldout")
    task = suite.task(suite.ids()[0])
    request = RolloutRequest(run=records.RUN, lane="eval", group="e1", slot=0, attempt=0, task=task.ref, seed=3)
    renderer = TerseRenderer(Tokenizer.train((), 256 + len(schemas.tags())))
    host = await Host.open(environment)
    try:
        where = Acquire(run=records.RUN, lane="eval", role="rollout", group="e1", slot=0, attempt=0,
                        isolation="group", seed=3, files=task.files)  # fmt: skip
        sandbox = await host.acquire(where)
        episode = await run_episode(
            engine=ScriptedEngine(script("oracle", task, suite.oracle(task.ref.task)), renderer),
            sandbox=sandbox,
            renderer=renderer,
            request=request,
            task=task,
        )
        tree = await sandbox.call(PullTree(patterns=()))
    finally:
        await host.close()
    made = records.trajectory(request)
    return msgspec.structs.replace(made, turns=episode.turns, digest_after=tree.digest, backend=host.backend)


async def _keep(folder: Path, trajectories: list[Trajectory]) -> None:
    async with (
        Server(folder / "broker") as server,
        await as_writers(server.url, server.credentials) as admin,
    ):
        await declare(admin)
        for made in trajectories:
            await admin.publish(TRAJ.at(run=records.RUN, group=made.group), made)


def tampered(made: Trajectory, turn: int, output: str) -> Trajectory:
    """With another answer on record for the first call of a turn."""
    results = list(made.turns[turn].results)
    results[0] = msgspec.structs.replace(results[0], output=output)
    turns = list(made.turns)
    turns[turn] = msgspec.structs.replace(turns[turn], results=tuple(results))
    return msgspec.structs.replace(made, turns=tuple(turns), id="e1-1-0", slot=1)


class Replay(NamedTuple):
    """A run with trajectories, and what is on record of the true one."""

    folder: Path
    true: Trajectory
    capsys: pytest.CaptureFixture[str]

    def again(self, id: str) -> tuple[int, str, str]:
        """`headrace replay RUN --trajectory ID`."""
        self.capsys.readouterr()
        code = main(("replay", str(self.folder), "--trajectory", id))
        said = self.capsys.readouterr()
        return code, said.out, said.err


def played(backend: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    """A true trajectory, one with a false answer in its last turn, and one of a user."""
    root = ROOT
    environment = Environment(backend=backend, warm=0, cache_dir=str(root / Environment().cache_dir))
    true = uvloop.run(_play(environment))
    users = msgspec.structs.replace(true, lane="production", id="e1-2-0")
    uvloop.run(_keep(folder, [true, tampered(true, len(true.turns) - 1, "never said"), users]))
    (folder / "config.json").write_bytes(msgspec.json.encode(Config(environment=environment)))
    return Replay(folder, true, capsys)


@pytest.mark.timeout(400)  # the first to ask for a template waits until it is made
@pytest.mark.parametrize("backend", ["process", pytest.param("qemu", marks=pytest.mark.vm)])
def test_calls_give_the_same_answers(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = played(backend, tmp_path / records.RUN, capsys)
    code, out, _ = run.again("e1-0-0")
    report = json.loads(out)
    assert code == 0
    assert report["calls"] == sum(len(turn.calls) for turn in run.true.turns) >= 3
    assert (report["trajectory"], report["backend"]) == ("e1-0-0", backend)
    assert (report["equal"], report["differing"], report["workspace_equal"]) == (True, [], True)


def test_a_false_record_is_found_and_what_cannot_be_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played("process", tmp_path / records.RUN, capsys)
    code, out, _ = run.again("e1-1-0")
    (differing,) = json.loads(out)["differing"]
    last = run.true.turns[-1]
    assert code == 1
    assert (differing["turn"], differing["call"]) == (last.index, last.calls[0].id)
    assert "-never said" in differing["diff"]
    for id, says in (("e1-2-0", "belongs to a user"), ("e1-7-0", "has no trajectory"), ("e1", "has no trajectory")):
        code, out, err = run.again(id)
        assert (code, out) == (1, "")
        assert says in err


def test_times_and_addresses_are_no_difference_and_everything_else_is() -> None:
    same = ("3 passed in 0.12s", "3 passed in 1.07s"), ("<obj at 0x7f01a2b3c4>", "<obj at 0x7fffffffc4>")
    for one, two in same:
        assert normal(one) == normal(two)
    for one, two in (("3 passed in 0.12s", "2 passed in 0.12s"), ("a = 0x10", "a = 0x11"), ("wait 5 s", "wait 6 s")):
        assert normal(one) != normal(two)


@pytest.mark.anyio
async def test_what_was_taken_out_is_counted_and_a_workspace_is_an_answer() -> None:
    made = records.trajectory(records.issued("e1"))
    turn = msgspec.structs.replace(
        made.turns[0],
        calls=(ToolCall(id="0.0", name="run_tests"), ToolCall(id="0.1", name="search")),
        results=(
            ToolResult(call_id="0.0", ok=True, output="ok in 0.20s"),
            ToolResult(call_id="0.1", ok=True, output="b"),
        ),
    )
    made = msgspec.structs.replace(made, turns=(turn,), digest_after="d1")
    answers = iter(["ok in 3.90s", "b"])

    async def run(call: object) -> ToolResult:
        return ToolResult(call_id="", ok=True, output=next(answers), wall_ms=9.0)

    async def digest() -> str:
        return "d2"

    comparison = await rerun(made, run, digest)
    assert (comparison.calls, comparison.differing, comparison.normalised) == (2, (), {"durations": 1})
    assert (comparison.workspace_equal, comparison.equal) == (False, False)
