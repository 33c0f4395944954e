"""`headrace rejudge`: the current judge on recorded trajectories, in real sandboxes."""

import json
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.cli.replay import with_rewards
from headrace.config import Config, ConfigError, Environment, Judge
from headrace.messages.subjects import CLOSE, SCORE, TRAJ
from headrace.tasks import open_suite
from tests.support import records
from tests.support.keys import as_writers

GROUP = "g000000"


async def _keep(folder: Path) -> None:
    """One group: a right answer that an earlier judge refused, and no answer at all."""
    suite = open_suite("generated/train")
    task = suite.task(suite.ids()[0])
    solution = suite.oracle(task.ref.task).solution
    async with (
        Server(folder / "broker") as server,
        await as_writers(server.url, server.credentials) as admin,
    ):
        await declare(admin)
        slots = []
        for slot, diff in enumerate((solution, {})):
            made = records.trajectory(records.issued(GROUP, slot))
            made = msgspec.structs.replace(made, task=task.ref, diff=diff)
            at = await admin.publish(TRAJ.at(run=records.RUN, group=GROUP), made)
            old = records.score(GROUP, slot, trajectory_seq=at, passed=False, task=task.ref)
            of = await admin.publish(SCORE.at(run=records.RUN, judge="j1", group=GROUP), old)
            slots.append((slot, 0, at, of))
        await admin.publish(CLOSE.at(run=records.RUN, group=GROUP), records.closed(GROUP, *slots))


def test_a_right_answer_that_was_refused_gets_its_due(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / records.RUN
    uvloop.run(_keep(folder))
    settings = Config(environment=Environment(backend="process", warm=0))
    (folder / "config.json").write_bytes(msgspec.json.encode(settings))

    def rejudge(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(("rejudge", str(folder), *words))
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = rejudge("--judge", "j2")
    report = json.loads(out)
    assert code == 0
    assert (report["groups"], report["slots"], report["verdicts_changed"]) == (1, 2, 1)
    assert [(f["slot"], f["reward"], f["reward_again"]) for f in report["flips"]] == [(0, 0.0, 1.0), (1, 0.0, 0.0)]
    assert [(f["advantage"], f["advantage_again"]) for f in report["flips"]] == [(0.0, 0.5), (0.0, -0.5)]
    code, out, _ = rejudge("--judge", "j3", "--recorded", "--with", "algorithm.options.reward.length_penalty=0.1")
    report = json.loads(out)
    assert (code, report["verdicts_changed"], report["rewards_changed"], report["flips"]) == (0, 0, 2, [])
    for words, code, says in [
        (("--judge", "J 2"), 2, "lower case letters"),
        (("--judge", "j4", "--with", "algorithm.learning_rate=1.0"), 2, "does not change a reward"),
    ]:
        wrong, out, err = rejudge(*words)
        assert (wrong, out) == (code, "")
        assert says in err


def test_a_change_of_the_judge_is_checked_beside_the_keys_that_the_run_has() -> None:
    section = Judge(
        rubric="old.toml", rubric_weight=0.5, model_url="http://127.0.0.1:1/v1", model="one", model_folder="w1"
    )
    changed = with_rewards(Config(judge=section), ['judge.model="two"', 'judge.model_folder="w2"']).judge
    assert changed == msgspec.structs.replace(section, model="two", model_folder="w2")
    with pytest.raises(ConfigError, match="without judge"):
        with_rewards(Config(), ['judge.model_folder="w2"'])
