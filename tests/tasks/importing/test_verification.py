"""Separate verifiers of Harbor tasks: artifacts, images of their own, and what is refused by name."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.messages.tasks import Artifact, Oracle, SandboxLimits, Task, Verifier
from headrace.vmhost.guest.globs import allowed
from tests.support import rows
from tests.tasks.importing.test_stepwise import made, sides

TOML = """schema_version = "1.4"
artifacts = {artifacts}
[environment]
docker_image = "app:1"
workdir = "/app"
[verifier]
environment_mode = "separate"
{verifier}
"""


def folder(place: Path, artifacts: str = '["/app/out"]', verifier: str = "", **files: str) -> None:
    toml = TOML.format(artifacts=artifacts, verifier=verifier)
    rows.write(place, {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "true\n"} | files)


def task_of(place: Path, **settings: str) -> tuple[Task, Oracle]:
    folder(place / "tasks" / "t", **settings)
    return sides(place)


def verifier_of(oracle: Oracle) -> Verifier:
    assert isinstance(oracle.verifier, Verifier)
    return oracle.verifier


def test_artifacts_outside_of_the_work_folder_and_the_published_ones_are_allowed(tmp_path: Path) -> None:
    task, oracle = task_of(tmp_path, artifacts='["/app/out", "/data/x.json", "rel.txt"]')
    assert not oracle.verifier and oracle.separate
    assert task.allowed[:2] == ("/logs/artifacts", "/logs/artifacts/**")
    assert task.allowed[2:] == ("out", "out/**", "/data/x.json", "/data/x.json/**", "rel.txt", "rel.txt/**")


def test_a_folder_above_the_work_folder_holds_its_changes(tmp_path: Path) -> None:
    folder(tmp_path / "tasks" / "t", artifacts='["/srv"]')
    toml = tmp_path / "tasks" / "t" / "task.toml"
    toml.write_text(toml.read_text().replace('"/app"', '"/srv/app"'))
    task, _ = sides(tmp_path)
    assert [path for path in ("out/x", "/srv/y", "/etc/z") if allowed(task.allowed, path)] == ["out/x", "/srv/y"]


@pytest.mark.parametrize("verifier", ["", '[verifier.environment]\ndocker_image = "judge:1"'])
def test_no_test_runs_where_the_hidden_files_cannot_be_placed(tmp_path: Path, verifier: str) -> None:
    _, oracle = task_of(tmp_path, verifier=verifier)
    machine = tmp_path / "machine"
    root = machine / "root"
    for path, data in oracle.hidden.items():
        target = machine / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert oracle.tests.prepare == ("sh", ".headrace/prepare.sh")
    scripts = []
    for name in (".headrace/prepare.sh", ".headrace/verify.sh"):
        script = oracle.hidden[name].decode().replace("/root/. / ", f"/root/. {root}/ ")
        scripts.append(re.sub(r"(?<![\w.])/(?=(?:logs|tests)\b)", f"{root}/", script))
    assert "".join(scripts).count(f"{root}/") >= 6, "nothing outside of the test's folder is written"
    test = b"echo 1 > %s/logs/verifier/reward.txt\n" % bytes(root)
    at = next(machine.glob(".headrace/**/test.sh"))
    at.write_bytes(test)

    def reward() -> bool:
        shutil.rmtree(machine / ".headrace/logs", ignore_errors=True)
        for script in scripts:
            if subprocess.run(["bash", "-c", script], cwd=machine, check=False, capture_output=True).returncode:
                break
        return (machine / ".headrace/logs/verifier/reward").exists()

    (root / "tests").mkdir(parents=True)
    assert reward()
    # The candidate's folder and its own test, in place of the judge's.
    (root / "tests" / "test.sh").unlink()
    (root / "tests" / "data").symlink_to(root)
    (at.parent / "data").mkdir()
    (at.parent / "data" / "want").write_text("42")
    assert not reward()


def test_a_verifier_gets_an_image_that_is_named(tmp_path: Path) -> None:
    artifacts = '[{source = "/app/out", exclude = ["*.pyc"]}]'
    environment = '[verifier.environment]\ndocker_image = "judge:1"\nworkdir = "/work"\nmemory_mb = 512\ncpus = 1\n'
    task, oracle = task_of(tmp_path, artifacts=artifacts, verifier=f"{environment}env = {{A = '1 2'}}")
    assert oracle.verifier == Verifier(
        image="judge:1",
        artifacts=(Artifact(path="/logs/artifacts"), Artifact(path="/app/out", exclude=("*.pyc",))),
        limits=SandboxLimits(vcpus=1, memory_mib=512),
    )
    assert oracle.hidden[".headrace/root/tests/test.sh"] == b"true\n"
    script = oracle.hidden[".headrace/verify.sh"].decode()
    assert "export A='1 2'\n" in script and "cd /work\n" in script and "\n/tests/test.sh\n" in script
    assert task.image == "app:1" and task.allowed == ("/logs/artifacts", "/logs/artifacts/**", "out", "out/**")


REFUSED = [
    ({"artifacts": '["/tmp/x"]'}, "the artifact /tmp/x lies in /tmp, whose changes no diff of an image holds"),
    ({"artifacts": '["/app/../etc"]'}, "the artifact /app/../etc: expected a path below the root without .."),
    ({"artifacts": '["/"]'}, "the artifact /: expected a path below the root"),
    ({"artifacts": "[{source = '/x', service = 'db'}]"}, "the artifact /x is of service 'db'"),
    ({"artifacts": "[{source = '/x', exclude = ['a']}]"}, "an artifact has exclude, which needs a verifier with"),
    ({"verifier": "[verifier.environment]\ncpus = 1"}, "verifier.environment names no docker_image, and there is no"),
    ({"verifier": "[verifier.environment]\ngpus = 1\ndocker_image = 'x'"}, "verifier.environment.gpus: sandboxes here"),
    (
        {"verifier": "[verifier.environment]\nenv = {KEY = '${KEY}'}\ndocker_image = 'x'"},
        "verifier.environment.env.KEY is filled in from the host's environment",
    ),
    (
        {"verifier": "[verifier.environment]\ndocker_image = 'x'", "tests/docker-compose.yaml": "services: {}"},
        "tests/docker-compose.yaml: a verifier here has one machine",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_a_verifier_that_has_no_form_here_is_named(tmp_path: Path, settings: dict[str, str], reason: str) -> None:
    folder(tmp_path / "tasks" / "t", **settings)
    (refusal,) = made(tmp_path).refused
    assert refusal.reason.startswith(reason), refusal.reason
