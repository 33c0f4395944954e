"""Dockerfiles of tasks become images of the node's store, commands included; in a template their folder is taken."""

import os
from pathlib import Path

import pytest

from headrace.messages.tasks import Change
from headrace.vmhost.images import building
from headrace.vmhost.images import imported as store
from tests.support import erofs
from tests.support.bases import busybox
from tests.tasks.importing.test_importing import TASK_TOML, harbor, imported

PLAIN = TASK_TOML.replace('workdir = "/app"\n', "")
SEPARATE = PLAIN.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
SEPARATE = SEPARATE.replace('"1.4"\n', '"1.4"\nartifacts = ["/work/out"]\n')


@pytest.mark.slow
def test_a_dockerfile_is_built_once_without_a_network(tmp_path: Path) -> None:
    tasks, cache = tmp_path / "tasks", tmp_path / "cache"
    commands = "FROM scratch\nCOPY root/ /\nWORKDIR /work\nRUN cat /proc/net/dev > net && echo $((6 * 7)) > made\n"
    folder = harbor(
        tasks, "runs", SEPARATE, **{"environment/Dockerfile": commands, "tests/Dockerfile": "FROM scratch\n"}
    )
    (folder / "tests" / "Dockerfile").write_text("FROM scratch\nWORKDIR /judge\nCOPY . /tests/\n")
    busybox(folder / "environment" / "root")
    harbor(tasks, "broken", PLAIN, **{"environment/Dockerfile": "FROM scratch\nCOPY ../../../../etc/shadow /x\n"})
    options = "--set", f"environment.cache_dir={cache}"
    suite, told = imported(tmp_path, "harbor", tasks, *options)
    (refusal,) = told["refused"]
    assert refusal["id"] == "broken" and refusal["reason"].startswith("environment/Dockerfile: buildah ended with code")
    task, oracle = suite.task("runs"), suite.oracle("runs")
    image = store.find(cache, str(task.image))
    assert image is not None and (image.workdir, task.repository, task.files) == ("/work", "/work", {})
    whole = erofs.merged([part.path for part in image.segments()])
    assert whole["work/made"].data == b"42\n"
    assert [line.split(b":")[0].strip() for line in whole["work/net"].data.splitlines()[2:]] == [b"lo"]
    assert task.allowed[:4] == ("/logs/artifacts", "/logs/artifacts/**", "out", "out/**")
    judge = store.find(cache, oracle.verifier.image) if oracle.verifier else None
    assert judge is not None and judge.workdir == "/judge"
    assert "tests/test.sh" in erofs.merged([part.path for part in judge.segments()])
    assert b"cd /judge\n" in oracle.hidden[".headrace/verify.sh"]
    times = [path.stat().st_mtime_ns for path in cache.glob("root-*")]
    building.forget(cache)
    (tmp_path / "suites" / "harbor" / "import.jsonl").unlink()
    again, _ = imported(tmp_path, "harbor", tasks, *options)
    assert again.task("runs").image == task.image
    assert [path.stat().st_mtime_ns for path in cache.glob("root-*")] == times, (
        "an image of equal files is not built again"
    )


def test_without_buildah_a_task_with_a_dockerfile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    harbor(tmp_path / "tasks", "t")
    _, told = imported(tmp_path, "harbor", tmp_path / "tasks", "--set", f"environment.cache_dir={tmp_path}", code=1)
    (refusal,) = told["refused"]
    assert refusal["reason"].startswith("environment/Dockerfile: buildah is not installed: apt-get install buildah")


def test_a_template_gets_the_folder_of_the_dockerfile(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "tasks", "t", PLAIN, **{"environment/in/tool": "y", "environment/.dockerignore": "in"})
    (folder / "environment/in/tool").chmod(0o755)
    (folder / "environment/in/empty").mkdir()
    os.symlink("tool", folder / "environment/in/link")
    suite, _ = imported(tmp_path, "harbor", tmp_path / "tasks", "--template", "light")
    task = suite.task("t")
    assert sorted(task.files) == ["README.md", "in/tool"]
    assert sorted(task.entries or (), key=lambda entry: entry.path) == [
        Change("in/empty", "folder", 0o755),
        Change("in/link", "link", 0o777, "tool"),
        Change("in/tool", "file", 0o755),
    ]


def test_the_folder_of_a_task_is_the_images_own_unless_the_task_names_one(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    harbor(tasks, "own", PLAIN + 'docker_image = "app:1"\n')
    harbor(tasks, "named", TASK_TOML + 'docker_image = "app:1"\n')
    harbor(tasks, "artifacts", SEPARATE.replace("/work", "/app") + 'docker_image = "app:1"\n')
    suite, told = imported(tmp_path, "harbor", tasks)
    assert {id: suite.task(id).repository for id in suite.ids()} == {"artifacts": "/app", "named": "/app", "own": ""}
    assert any(note.startswith("environment.workdir is not named: /app is taken") for note in told["notes"])
