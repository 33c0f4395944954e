"""Harbor tasks with steps: which forms become tasks, which are refused by name, and how scripted policies fare."""

from pathlib import Path

import pytest

from headrace.cli.tasks.suites import images_of
from headrace.messages.rollout import Limits
from headrace.messages.tasks import Oracle, Step, Steps, StepTests, Task
from headrace.tasks.exporting.harbor import ExportRefused, folder_of
from headrace.tasks.importing import harbor
from headrace.tasks.importing.base import ImportOptions
from headrace.tasks.importing.writing import ImportReport, import_suite
from headrace.tasks.suites import FolderSuite
from headrace.vmhost.node.host import Host
from tests.support import rows
from tests.support.playing import played
from tests.tasks.importing.test_importing import host as host

pytestmark = pytest.mark.anyio
TOML = """schema_version = "1.4"
{top}
[metadata]
category = "files"
[verifier]
timeout_sec = 60.0
[verifier.env]
WANTED = "one"
[environment]
workdir = "/app"
docker_image = "app:1"
[[steps]]
name = "first"
{first}
[steps.agent]
timeout_sec = 30.0
[[steps]]
name = "second"
{second}
[steps.agent]
timeout_sec = 60
[steps.verifier]
timeout_sec = 90.0
[steps.verifier.env]
WANTED = "two"
"""
FILES = {
    "tests/test.sh": "bash /tests/check.sh /app/first.txt\n",
    "tests/check.sh": 'grep -q "$WANTED" $1 && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    "steps/first/instruction.md": "Write one to /app/first.txt.\n",
    "steps/first/solution/solve.sh": "echo one > /app/first.txt\n",
    "steps/second/instruction.md": "Write what /app/given.txt says to /app/second.txt.\n",
    "steps/second/tests/test.sh": "bash /tests/check.sh /app/second.txt\n",
    "steps/second/solution/solve.sh": "cat /app/given.txt > /app/second.txt\n",
    "steps/second/workdir/given.txt": "two\n",
}


def folder(place: Path, top: str = "", first: str = "", second: str = "", **files: str) -> Path:
    rows.write(place, {"task.toml": TOML.format(top=top, first=first, second=second)} | FILES | files)
    return place


def made(place: Path, template: str = "") -> ImportReport:
    options = ImportOptions(suite="s", source=place / "tasks", template=template)
    return import_suite("s", place / "s", "harbor", harbor.read(options))


def sides(place: Path, template: str = "") -> tuple[Task, Oracle]:
    report = made(place, template)
    assert not report.refused, report.refused
    suite = FolderSuite("s", place / "s")
    return suite.task("t"), suite.oracle("t")


def of_steps(oracle: Oracle) -> tuple[StepTests, ...]:
    assert isinstance(oracle.steps, Steps)
    return oracle.steps.tests


def test_a_folder_with_steps_is_a_task(tmp_path: Path) -> None:
    folder(tmp_path / "tasks" / "t", first="min_reward = 1.0", second="min_reward = { reward = 1, style = 0.5 }")
    task, oracle = sides(tmp_path)
    assert task.prompt == FILES["steps/first/instruction.md"] and task.files == {}
    assert task.steps == (Step(prompt=FILES["steps/second/instruction.md"], files={"given.txt": b"two\n"}),)
    assert task.sandbox_limits.time_s == 90.0, "the steps' times together"
    first, second = of_steps(oracle)
    assert (first.name, first.min_reward, first.tests.timeout_s) == ("first", {"reward": 1.0}, 60.0)
    assert (second.name, second.min_reward, second.tests.timeout_s) == ("second", {"reward": 1.0, "style": 0.5}, 90.0)
    assert first.hidden[".headrace/tests/test.sh"].decode() == FILES["tests/test.sh"]
    assert second.hidden[".headrace/tests/test.sh"].decode() == FILES["steps/second/tests/test.sh"]
    assert second.hidden[".headrace/tests/check.sh"].decode() == FILES["tests/check.sh"]
    assert b"export WANTED=two\n" in second.hidden[".headrace/verify.sh"]
    assert isinstance(oracle.steps, Steps) and oracle.steps.reward == "mean"
    assert oracle.hidden == {} and task.allowed == ("**",)
    with pytest.raises(ExportRefused, match="steps, and a verifier with an image of its own, are not exported"):
        folder_of(task, oracle)


def test_steps_have_artifacts_and_images_of_their_own(tmp_path: Path) -> None:
    verifier = 'artifacts = ["/logs/notes"]\nverifier.environment.docker_image = "judge:1"'
    text = TOML.format(top='artifacts = ["/app/first.txt"]', first=verifier, second="").replace(
        "[steps.verifier]\ntimeout_sec = 90.0\n", '[steps.verifier]\nenvironment_mode = "separate"\n'
    )
    folder(tmp_path / "tasks" / "t", **{"task.toml": text})
    task, oracle = sides(tmp_path)
    first, second = of_steps(oracle)
    assert first.verifier and first.verifier.image == "judge:1" and not second.verifier
    assert [artifact.path for artifact in first.verifier.artifacts] == [
        "/logs/artifacts",
        "/app/first.txt",
        "/logs/notes",
    ]
    assert second.allowed == ("/logs/artifacts", "/logs/artifacts/**", "first.txt", "first.txt/**")
    assert task.allowed == (*second.allowed, "/logs/notes", "/logs/notes/**")
    assert images_of(FolderSuite("s", tmp_path / "s"), ["t"]) == {"app:1", "judge:1"}, "all that a machine has to store"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"first": "healthcheck.command = 'true'"}, "steps.first.healthcheck: sandboxes here have no health check"),
        ({"steps/first/workdir/setup.sh": "true"}, "steps/first/workdir/setup.sh: no command runs here between two"),
        ({"first": "contributes_to_reward = false"}, "steps.first.contributes_to_reward is no setting of a step"),
        (
            {"second": "agent.network_mode = 'public'", "cut": "[steps.agent]\ntimeout_sec = 60\n"},
            "steps.second.agent.",
        ),
        ({"first": "verifier.collect = [{command = 'x'}]"}, "step first: verifier.collect: commands between agent and"),
        (
            {"second": "agent.timeout_sec = 'long'", "cut": "[steps.agent]\ntimeout_sec = 60\n"},
            "limits: Expected `float`, got `str`",
        ),
        ({"first": "min_reward = 'all'"}, "steps.first.min_reward: expected numbers, got reward = 'all'"),
        ({"top": "multi_step_reward_strategy = 'best'"}, "multi_step_reward_strategy: expected mean or final, got"),
        ({"steps/second/instruction.md": ""}, "expected steps/second/instruction.md"),
        ({"tests/test.sh": "", "gone": "tests/test.sh"}, "step first: expected tests/test.sh"),
        ({"first": "verifier.environment_mode = 'other'"}, "step first: verifier.environment_mode = 'other': expected"),
    ],
)
def test_a_setting_that_has_no_form_here_is_named(tmp_path: Path, settings: dict[str, str], reason: str) -> None:
    gone, cut = settings.pop("gone", ""), settings.pop("cut", "")
    place = folder(tmp_path / "tasks" / "t", **settings)
    if gone:
        (place / gone).unlink()
    (place / "task.toml").write_text((place / "task.toml").read_text().replace(cut or "\0", ""))
    (refusal,) = made(tmp_path).refused
    assert refusal.reason.startswith(reason), refusal.reason


@pytest.mark.parametrize("name", ["../x", "first", "", "a/b"])
def test_the_name_of_a_step_is_one_folder_and_unique(tmp_path: Path, name: str) -> None:
    place = folder(tmp_path / "tasks" / "t")
    text = (place / "task.toml").read_text()
    (place / "task.toml").write_text(text.replace('name = "second"', f'name = "{name}"'))
    (refusal,) = made(tmp_path).refused
    assert refusal.reason == f"steps, entry 2: expected a name that no other step has, got {name!r}"


async def test_scripted_policies_meet_the_verifier_of_every_step(host: Host, tmp_path: Path) -> None:
    folder(tmp_path / "tasks" / "t", first="min_reward = 1.0")
    folder(tmp_path / "tasks" / "last", top='multi_step_reward_strategy = "final"')
    assert made(tmp_path, "light").tasks == 2
    suite = FolderSuite("s", tmp_path / "s")
    gold = await played(host, suite, "t", "oracle")
    assert (gold.decision, gold.value, [step.share for step in gold.steps]) == ("passed", 1.0, [0.5, 0.5])
    for policy in ("idle", "edit-tests"):
        lost = await played(host, suite, "t", policy)
        assert (lost.decision, lost.value) == ("failed", 0.0)
        assert lost.steps[0].reason == "min_reward: reward is 0, expected at least 1"
    two_turns = Limits(max_turns=2, max_tokens=200_000, context_tokens=200_000)
    half = await played(host, suite, "t", "oracle", two_turns)
    assert (half.decision, half.value, [step.value for step in half.steps]) == ("failed", 0.5, [1.0, 0.0])
    assert (await played(host, suite, "last", "oracle")).decision == "passed"
    assert (await played(host, suite, "last", "oracle", two_turns)).value == 0.0
