"""The scripted oracle runs a known solution as a certificate's examination does, whatever it consists of."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.config import Environment
from headrace.judging import HostMachines
from headrace.judging.certifying import certify
from headrace.messages.tasks import Change
from headrace.vmhost.node.host import Host
from tests.support.playing import played, report
from tests.tasks.importing.test_importing import TASK_TOML, harbor, imported, jsonl

pytestmark = pytest.mark.anyio


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


ARRAYS = '#!/bin/bash\nset -eu\nparts=(4 2)\nprintf "%s" "${parts[@]}" > out.txt\n'
PYTHON = "#!/usr/bin/env python3\nopen('out.txt', 'w').write('</terminal>42')\n"
LONG = f"#!/bin/bash\n: <<'END'\n{'x' * 99}\n{'y' * (132 << 10)}\nEND\necho 42 > out.txt"
TEXTS = {
    "crlf": "42\r\nb\r\n",
    "feed": "a\x0c42\n\x0bb\n\u2028c\n",
    "open": "42",
    "lines": "\n\n42\n",
    "markup": "<p>42</p>\n</write_file>\n",
    "nothing": "",
}
SCRIPTS = {
    "arrays": ARRAYS,
    "python": PYTHON,
    "long": LONG,
    "plain": "echo 42 > out.txt",
    "exits": "echo 42 >out.txt\nexit",
}


def rows_of() -> list[dict[str, Any]]:
    row: dict[str, Any] = {"prompt": "x", "files": {"README": "x", "was.txt": "a\r\nb"}}
    made = [
        row | {"id": name, "solution_script": text, "test_command": "grep -q 42 out.txt"}
        for name, text in SCRIPTS.items()
    ]
    for name, text in TEXTS.items():
        hidden = {"want": text, "want2": f"a\r\n{text}"}
        test = "cmp out.txt want && cmp was.txt want2"
        solution = {"out.txt": text, "was.txt": f"a\r\n{text}"}
        made.append(row | {"id": name, "hidden": hidden, "test_command": test, "solution": solution})
    return made


async def test_the_oracle_makes_what_the_certifier_makes(host: Host, tmp_path: Path) -> None:
    suite, _ = imported(tmp_path, "jsonl", jsonl(tmp_path, *rows_of()))
    assert len(suite.ids()) == len(SCRIPTS) + len(TEXTS)
    for id in suite.ids():
        assert (await played(host, suite, id, "oracle")).decision == "passed", id
    assert (await played(host, suite, "arrays", "idle")).decision == "failed"


@pytest.mark.slow
async def test_the_certifier_makes_what_the_oracle_makes(host: Host, tmp_path: Path) -> None:
    suite, _ = imported(tmp_path, "jsonl", jsonl(tmp_path, *rows_of()))
    for id in suite.ids():
        made = await certify(suite, id, HostMachines(host), report, backend=host.backend)
        assert (made.gold_passed, made.noop) == (5, "failed"), made


SOLVE = """#!/usr/bin/env python3
import os, subprocess
here = os.path.dirname(os.path.abspath(__file__))
os.makedirs("/app/out", exist_ok=True)
answer = open("/solution/answer.txt").read() + open(here + "/link").read()
said = subprocess.run(["/solution/bin/helper", os.environ["WORD"]], check=True, capture_output=True, text=True).stdout
open("/app/out/answer.txt", "w").write(answer + said)
"""
TEST = """#!/usr/bin/env python3
import os, subprocess
good = open("/app/out/answer.txt").read() == "4444two words\\n" and os.readlink("/app/latest") == "README.md"
good = good and os.path.isdir("/app/empty") and os.path.isdir("/app/node_modules")
good = good and subprocess.run(["/app/tool"]).returncode == 0 == subprocess.run(["/tests/bin/check"]).returncode
open("/logs/verifier/reward.txt", "w").write(str(int(good)))
"""


def with_solution(tasks: Path, name: str, toml: str = "") -> Path:
    program = "#!/bin/sh\n"
    place = harbor(
        tasks,
        name,
        f'{TASK_TOML}{toml}[solution.env]\nWORD = "two words"\n',
        **{
            "tests/test.sh": TEST,
            "tests/bin/check": program,
            "solution/solve.sh": SOLVE,
            "solution/answer.txt": "44",
            "solution/bin/helper": f'{program}echo "$1"\n',
            "environment/tool": program,
            "environment/node_modules/m.js": "1\n",
        },
    )
    (place / "solution/link").symlink_to("answer.txt")
    (place / "environment/latest").symlink_to("README.md")
    (place / "environment/empty").mkdir()
    for path in ("solution/bin/helper", "environment/tool", "tests/bin/check"):
        (place / path).chmod(0o755)
    return place


async def test_a_harbor_solution_has_its_folder_environment_and_interpreter(host: Host, tmp_path: Path) -> None:
    with_solution(tmp_path / "tasks", "t")
    suite, told = imported(tmp_path, "harbor", tmp_path / "tasks", "--template", "light")
    assert told["refused"] == []
    task, oracle = suite.task("t"), suite.oracle("t")
    assert sorted(oracle.solution) == [
        f".headrace/solution/{name}" for name in ("answer.txt", "bin/helper", "solve.sh")
    ]
    assert Change(".headrace/solution/link", "link", 0o777, "answer.txt") in (oracle.solution_entries or ())
    assert Change("latest", "link", 0o777, "README.md") in (task.entries or ())
    gold = await played(host, suite, "t", "oracle")
    assert (gold.decision, gold.value) == ("passed", 1.0), gold
    assert (await played(host, suite, "t", "idle")).decision == "failed"
    made = await certify(suite, "t", HostMachines(host), report, backend=host.backend)
    assert (made.verdict, made.gold_passed) == ("certified", 5), made
    assert any(note.startswith("import: paths /app, /tests, /solution and /logs") for note in made.notes)


def test_a_solution_that_needs_a_secret_of_the_host_is_left_out_by_name(tmp_path: Path) -> None:
    place = with_solution(tmp_path / "tasks", "t", 'docker_image = "app:1"\n')
    (place / "task.toml").write_text((place / "task.toml").read_text().replace('"two words"', '"${API_KEY}"'))
    suite, told = imported(tmp_path, "harbor", tmp_path / "tasks")
    assert suite.oracle("t").script == "" and suite.oracle("t").solution == {}
    assert any("solution.env.WORD is filled in from the host's environment" in note for note in told["notes"])


def test_a_task_that_cannot_run_is_refused_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {"prompt": "x", "test_command": "echo 'saw \x1b[31mred'; cat out.txt; false"}
    good = {"test_command": "grep -q 42 out.txt", "files": {"a": "1"}, "solution": {"out.txt": "42\n"}}
    made = [
        row | good | {"id": "image", "image": "docker.io/no/such:1"},
        row | good | {"id": "huge", "vcpus": 1000, "memory_mib": 1 << 22},
        row | good | {"id": "torn"},
        row | good | {"id": "good"},
        row | good | {"id": "fails", "test_command": row["test_command"]},
        row | good | {"id": "breaks", "solution": {}, "solution_script": "echo one\necho why >&2\nexit 3"},
    ]
    suite, _ = imported(tmp_path, "jsonl", jsonl(tmp_path, *made))
    (tmp_path / "suites" / "jsonl" / "torn.oracle").write_bytes(b"\x81")
    settings = ["--set", f"tasks.dir={tmp_path / 'suites'}", "--set", "environment.backend=process"]
    assert main(["tasks", "certify", "jsonl", *settings]) == 1
    said = capsys.readouterr().out
    assert "1 of 6 tasks are certified" in said
    assert "    | saw \\x1b[31mred" in said and "    | 42" in said, "the output explains the refusal"
    written = json.loads((tmp_path / "suites" / "certificates" / "jsonl.json").read_text())["certificates"]
    by_id = {each["task"]["task"]: each for each in written}
    assert {id: each["verdict"] for id, each in by_id.items()} == {id: "refused" for id in by_id} | {
        "good": "certified"
    }
    assert by_id["breaks"]["output"].splitlines()[:2] == ["one", "why"]
    assert "output" not in by_id["good"]
    for id in ("image", "huge", "torn"):
        assert by_id[id]["reasons"][0].startswith("the task cannot run here: "), id
    assert len(suite.ids()) == 6
