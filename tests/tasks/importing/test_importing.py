"""Imported suites: every format's known solution passes, no policy without it does, and what cannot run is refused."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from headrace.cli.main import main
from headrace.config import Environment
from headrace.messages.tasks import SandboxLimits
from headrace.tasks import Suite, open_suite
from headrace.vmhost.node.host import Host
from tests.support import rows
from tests.support.playing import played

pytestmark = pytest.mark.anyio
POLICIES = {"oracle": "passed", "idle": "failed"}

TASK_TOML = """schema_version = "1.4"
[metadata]
category = "files"
[verifier]
timeout_sec = 60.0
[environment]
workdir = "/app"
network_mode = "no-network"
"""
DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY . /app\n"
TEST_SH = """#!/bin/bash
cd /app
if grep -q 42 /app/out/answer.txt && test -f /tests/helper.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE_SH = "#!/bin/bash\nmkdir -p /app/out\necho 42 > /app/out/answer.txt\n"


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


def imported(folder: Path, format: str, source: Path, *options: str, code: int = 0) -> tuple[Suite, dict[str, Any]]:
    suites = folder / "suites"
    arguments = ["tasks", "import", format, str(source), "--name", format, "--set", f"tasks.dir={suites}", *options]
    assert main(arguments) == code
    return open_suite(format, suites), json.loads((suites / format / "import.json").read_text())


def jsonl(folder: Path, *made: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in made))
    return file


async def verdicts(host: Host | None, suite: Suite, id: str) -> dict[str, str]:
    return {policy: (await played(host, suite, id, policy)).decision for policy in POLICIES}


async def test_a_row_with_its_repository_is_judged_by_the_sandbox(host: Host, tmp_path: Path) -> None:
    row = rows.repository(tmp_path / "repos")
    suite, report = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    (id,) = suite.ids()
    task, oracle = suite.task(id), suite.oracle(id)
    assert (id, report["refused"], report["trust"]) == ("owner__calc-1", [], "report")
    assert task.files["tests/test_core.py"] == rows.VISIBLE.encode(), "the agent sees the tests before the test patch"
    assert oracle.hidden == {"tests/test_core.py": rows.HIDDEN.encode()} and oracle.removed == ("calc/old.py",)
    assert await verdicts(host, suite, id) == POLICIES
    assert (await played(host, suite, id, "edit-tests")).decision == "failed"


async def test_a_row_of_a_project_with_its_own_runner_is_judged_by_its_log(host: Host, tmp_path: Path) -> None:
    row = rows.repository(tmp_path / "repos") | {"repo": "sympy/sympy"}
    (tmp_path / "repos" / "owner__calc").rename(tmp_path / "repos" / "sympy__sympy")
    suite, report = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    oracle = suite.oracle(suite.ids()[0])
    assert (report["trust"], oracle.grading.parser, oracle.grading.trust) == ("report", "sympy", "report")
    shell = row | {"test_patch": row["test_patch"].replace(".py", ".sh"), "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": []}
    suite, report = imported(tmp_path / "shell", "swebench", jsonl(tmp_path, shell))
    assert report["trust"] == suite.task(suite.ids()[0]).trust == "log", "nobody can alter these"


def test_rows_with_an_image_name_it_and_carry_their_script(tmp_path: Path) -> None:
    old = rows.repository(tmp_path / "repos")
    new = old | {
        "instance_id": "owner__calc-2",
        "image": "docker.io/swebench/calc:1",
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "eval_script": "#!/bin/bash\ncd /testbed\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n",
    }
    suite, report = imported(tmp_path, "swebench", jsonl(tmp_path, old, new))
    assert report["tasks"] == 2 and report["trust"] == "report"
    first, second = (suite.task(id) for id in suite.ids())
    assert first.image == "docker.io/swebench/sweb.eval.x86_64.owner_1776_calc-1:latest"
    assert (second.image, second.repository, second.files) == ("docker.io/swebench/calc:1", "/testbed", {})
    made = suite.oracle(second.ref.task)
    assert made.hidden[".headrace/eval.sh"].decode() == new["eval_script"]
    assert made.hidden[".headrace/test.patch"].decode() == old["test_patch"]
    assert made.grading.parser == "pytest_spaces" and made.script.endswith("| base64 -d | git apply -")
    script = suite.oracle(first.ref.task).hidden[".headrace/eval.sh"].decode()
    assert f"git checkout {old['base_commit']}" in script and "tests/test_core.py" in script


def test_rows_of_swe_rebench_bring_their_command_and_parser(tmp_path: Path) -> None:
    config = {"test_cmd": ["make deps", "pytest -rA tests"], "log_parser": "parse_log_pytest", "install": "x"}
    old = rows.repository(tmp_path / "repos")
    new = old | {"image_name": "docker.io/swerebenchv2/calc:1", "install_config": config, "language": "python"}
    unknown = new | {"instance_id": "b", "install_config": config | {"log_parser": "parse_log_elixir"}}
    timed = new | {"instance_id": "c", "FAIL_TO_PASS": ["adds [1.34 ms]"], "install_config": json.dumps(config)}
    suite, report = imported(tmp_path, "swebench", jsonl(tmp_path, new, unknown, timed))
    assert report["tasks"] == 1
    (id,) = suite.ids()
    task, oracle = suite.task(id), suite.oracle(id)
    assert (task.image, task.repository, oracle.grading.parser) == ("docker.io/swerebenchv2/calc:1", "/calc", "pytest")
    script = oracle.hidden[".headrace/eval.sh"].decode()
    assert "cd /calc" in script and "make deps\npytest -rA tests)" in script, "no path is added to the row's command"
    refused = json.dumps(report)
    assert "no parser parse_log_elixir" in refused and "adds [1.34 ms]" in refused


async def test_a_bug_of_swesmith_is_undone(host: Host, tmp_path: Path) -> None:
    row = rows.bug(tmp_path / "repos")
    suite, _ = imported(tmp_path, "swesmith", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    (id,) = suite.ids()
    assert "tests/test_core.py" not in suite.task(id).files
    assert suite.task(id).files["calc/core.py"] == rows.CALC.encode()
    assert await verdicts(host, suite, id) == POLICIES


def harbor(folder: Path, name: str, toml: str = TASK_TOML, **files: str) -> Path:
    rows.write(
        folder / name,
        {
            "task.toml": toml,
            "instruction.md": "Write 42 to /app/out/answer.txt.\n",
            "environment/Dockerfile": DOCKERFILE,
            "environment/README.md": "read me\n",
            "tests/test.sh": TEST_SH,
            "tests/helper.txt": "here\n",
            "solution/solve.sh": SOLVE_SH,
        }
        | files,
    )
    return folder / name


async def test_harbor_folders_run_in_a_template(host: Host, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    harbor(tasks, "shared")
    separate = TASK_TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
    separate = separate.replace('"1.4"\n', '"1.4"\nartifacts = ["/app/out/answer.txt"]\n')
    harbor(tasks, "separate", separate)
    harbor(
        tasks,
        "json",
        **{"tests/test.sh": TEST_SH.replace("echo 1;", "echo '{\"reward\": 1}';").replace(".txt\n", ".json\n")},
    )
    harbor(tasks, "old", TASK_TOML.replace("schema_version", "version").replace("1.4", "1.0"))
    harbor(tasks, "gpu", TASK_TOML + "gpus = 1\n")
    harbor(tasks, "compose", **{"environment/docker-compose.yaml": "services: {}\n"})
    harbor(tasks, "future", TASK_TOML.replace("1.4", "2.0"))
    suite, report = imported(tmp_path, "harbor", tasks, "--template", "light")
    assert list(suite.ids()) == ["json", "old", "separate", "shared"]
    assert {refusal["id"]: refusal["reason"] for refusal in report["refused"]} == {
        "compose": "environment/docker-compose.yaml: a task here has one machine",
        "future": "task.toml has schema 2.0; expected one of 1.0, 1.1, 1.2, 1.3, 1.4",
        "gpu": "environment.gpus: sandboxes here have no GPU",
    }
    assert report["notes"] == {"paths /app, /tests, /solution and /logs moved into the workspace": 4}
    assert suite.task("shared").files == {"README.md": b"read me\n"}
    assert suite.task("shared").prompt == "Write 42 to out/answer.txt.\n"
    for id in suite.ids():
        assert await verdicts(host, suite, id) == POLICIES, id
    assert (suite.oracle("separate").separate, suite.task("separate").allowed[0]) == (True, "out/answer.txt")


def test_a_harbor_folder_names_its_image(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks", "image", TASK_TOML + 'docker_image = "docker.io/org/image:1"\n')
    sizes = 'docker_image = "app:1"\ncpus = 1.5\nmemory_mb = 2048\nstorage = "1G"\n'
    harbor(tmp_path / "tasks", "limited", TASK_TOML + sizes + "[agent]\ntimeout_sec = 900.0\n")
    harbor(tmp_path / "tasks", "large", TASK_TOML + 'docker_image = "app:1"\nstorage_mb = 10240\n')
    harbor(tmp_path / "tasks", "huge", TASK_TOML + 'docker_image = "app:1"\nstorage = "1T"\n')
    harbor(tmp_path / "tasks", "odd", TASK_TOML + 'docker_image = "app:1"\nmemory = "much"\n')
    suite, report = imported(tmp_path, "harbor", tmp_path / "tasks")
    assert suite.task("limited").limits == SandboxLimits(vcpus=2, memory_mib=2048, disk_mib=1024, time_s=900.0)
    assert suite.task("large").limits == SandboxLimits(disk_mib=10240)
    assert suite.task("huge").limits == SandboxLimits(disk_mib=65536)
    assert any("a sandbox's disk has at most 65536 MiB" in note for note in report["notes"])
    image = suite.task("image")
    assert (image.image, image.repository, image.files) == ("docker.io/org/image:1", "/app", {})
    assert [refusal["id"] for refusal in report["refused"]] == ["odd"]
    assert report["refused"][0]["reason"] == "environment.memory: expected a size such as 2048 or 2G, got 'much'"
    assert image.limits is UNSET
    oracle = suite.oracle("image")
    assert oracle.tests.prepare == ("sh", ".headrace/prepare.sh")
    assert b"cp -r .headrace/tests/. /tests/" in oracle.hidden[".headrace/prepare.sh"]
    assert image.allowed == ("**",)
    note = "the verifier gets the changes in the work folder; --allow '/etc/**' adds others"
    assert report["notes"][note] == 4
    suite, report = imported(tmp_path, "harbor", tmp_path / "tasks", "--allow", "/etc/**", "--allow", "/srv/*")
    assert suite.task("image").allowed == ("**", "/etc/**", "/srv/*") and note not in report["notes"]


MINE: list[dict[str, Any]] = [
    {"id": "sum", "prompt": "1 + 1?", "answer": "2", "checker": "number"},
    {"id": "word", "prompt": "Capital of France?", "answer": "Paris", "system": "Answer in one word."},
    {
        "id": "file",
        "prompt": "Write 42 to out.txt.",
        "files": {"README": "x"},
        "test_command": "grep -q 42 out.txt",
        "solution": {"out.txt": "42\n"},
    },
    {
        "id": "named",
        "prompt": "Fix add.",
        "files": {"calc.py": rows.CALC},
        "hidden": {"test_calc.py": rows.HIDDEN.replace("calc.core", "calc")},
        "test_command": "python3 -m pytest -rA -p no:cacheprovider test_calc.py",
        "log_parser": "pytest",
        "fail_to_pass": ["test_calc.py::test_add[1-2-3]"],
        "pass_to_pass": ["test_calc.py::test_scale"],
        "solution": {"calc.py": rows.FIXED},
    },
    {
        "id": "graded",
        "prompt": "Write a number to out.txt.",
        "files": {"README": "x"},
        "test_command": "cp out.txt .headrace/reward",
        "reward_file": ".headrace/reward",
        "passes_at": 0.5,
        "solution_script": "echo 0.75 > out.txt",
    },
]


async def test_plain_rows_with_and_without_a_sandbox(host: Host, tmp_path: Path) -> None:
    bad: list[Any] = [
        "no json",
        {"id": "a", "prompt": "x"},
        {"id": "b", "answer": "y"},
        {"id": "c", "prompt": "x", "answer": "y", "promt": ""},
        {"id": "d", "prompt": "x", "test_command": "true"},
        {"id": "e", "prompt": "x", "test_command": "true", "files": {"/etc/x": ""}},
        {"id": "sum", "prompt": "x", "answer": "y"},
    ]
    suite, report = imported(tmp_path, "jsonl", jsonl(tmp_path, *MINE, *bad))
    assert list(suite.ids()) == [row["id"] for row in MINE]
    reasons = [refusal["reason"].partition(";")[0] for refusal in report["refused"]]
    assert [reason[:34] for reason in reasons] == [
        "the row is not JSON: Expecting val",
        "expected a test_command, or an ans",
        "the row has no prompt",
        "unknown field promt",
        "a task with a test_command needs f",
        "files: expected paths inside the w",
        "an earlier entry has the same id",
    ]
    for id in suite.ids():
        assert await verdicts(host, suite, id) == POLICIES, id
    assert (await played(host, suite, "graded", "oracle")).value == 0.75
    assert not suite.task("sum").sandbox and suite.task("word").system == "Answer in one word."


def test_an_import_that_was_cut_off_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(tmp_path, *MINE[:2])
    imported(tmp_path, "jsonl", file)
    folder = tmp_path / "suites" / "jsonl"
    (folder / "suite.json").unlink()
    journal = (folder / "import.jsonl").read_bytes()
    (folder / "import.jsonl").write_bytes(journal[:-9])  # the last line is cut
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("sum.*")}
    changed = MINE[1] | {"answer": "Lyon"}
    suite, report = imported(tmp_path, "jsonl", jsonl(tmp_path, MINE[0], changed, MINE[2]))
    assert (report["tasks"], report["made"]) == (3, 2)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("sum.*")} == times, (
        "the first was not made again"
    )
    assert suite.oracle("word").answer == "answer: Lyon"
    assert "3 tasks (2 new), 0 refused" in capsys.readouterr().out


def test_a_source_without_tasks_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", f"tasks.dir={tmp_path}"]
    assert main(["tasks", "import", "harbor", str(tmp_path), *options]) == 2
    assert "has no task.toml" in capsys.readouterr().err
    assert main(["tasks", "import", "swebench", str(tmp_path / "no.jsonl"), *options]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["tasks", "import", "jsonl", str(jsonl(tmp_path, *MINE)), "--tools", "no_tool", *options]) == 2
    assert "--tools: headrace.tools" in capsys.readouterr().err
    assert main(["tasks", "import", "harbor", str(tmp_path), "--allow", "etc", *options]) == 2
    assert "--allow: expected a pattern of absolute paths, such as '/etc/**', got 'etc'" in capsys.readouterr().err
    assert main(["tasks", "import", "jsonl", str(jsonl(tmp_path, *MINE)), "--allow", "/etc/**", *options]) == 2
    assert "--allow is for harbor tasks in images" in capsys.readouterr().err
