"""The working directory of a Dockerfile's last image, and the modes and links of the files that it copies."""

from pathlib import Path

import pytest

from headrace.messages.tasks import Change
from headrace.tasks.importing import dockerfiles
from headrace.tasks.importing.base import ImportRefused
from tests.support import rows
from tests.tasks.importing.test_importing import TASK_TOML, harbor, imported

FOLDERS = [
    ("FROM a\nWORKDIR /x\nWORKDIR y", "/x/y"),
    ("FROM a AS build\nWORKDIR /build\nFROM b\nCOPY --from=build /x /x", ""),
    ("FROM a AS build\nWORKDIR /build\nFROM b\nWORKDIR srv", "/srv"),
    ("FROM a AS base\nENV APP=/srv/work\nWORKDIR $APP\nFROM x AS tools\nWORKDIR /t\nFROM Base\nRUN make", "/srv/work"),
    ("FROM a\nENV APP=/srv/work\nWORKDIR $APP", "/srv/work"),
    ("FROM a\nENV A=/srv\nENV A=/x B=${A}/in\nENV C $B/c\nWORKDIR ${C}", "/srv/in/c"),
    ("ARG ROOT=/data\nFROM a\nARG ROOT\nWORKDIR ${ROOT}/app", "/data/app"),
    ("FROM a\nARG ROOT=/data\nWORKDIR ${ROOT:-/other}/${NONE:-app}", "/data/app"),
    ("FROM a\nRUN <<EOF\nWORKDIR /no\nEOF\nWORKDIR /yes", "/yes"),
    ("FROM a\nworkdir '/a b'\nRUN cd /x && \\\n  WORKDIR /no", "/a b"),
    ("FROM a\nRUN make", ""),
]


@pytest.mark.parametrize(("text", "folder"), FOLDERS)
def test_the_folder_is_that_of_the_last_image(text: str, folder: str) -> None:
    assert dockerfiles.workdir(dockerfiles.read(text), "D") == folder


def test_a_folder_that_only_the_base_image_knows_is_named() -> None:
    with pytest.raises(ImportRefused, match=r"D uses \$HOME, which it does not set; name the folder as environment"):
        dockerfiles.workdir(dockerfiles.read("FROM a\nWORKDIR $HOME/app"), "D")


def test_copies_keep_modes_links_and_empty_folders(tmp_path: Path) -> None:
    rows.write(tmp_path, {"run": "x", "in/tool": "y", "in/node_modules/m.js": "1"})
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "in/tool").chmod(0o755)
    (tmp_path / "in/empty").mkdir()
    (tmp_path / "in/link").symlink_to("tool")
    text = "FROM a\nENV APP=/w\nWORKDIR $APP\nCOPY run $APP/\nCOPY in sub\nCOPY --chmod=0644 run plain\n"
    tree = dockerfiles.placed(tmp_path, "D", text).tree
    assert sorted(tree.files) == ["/w/plain", "/w/run", "/w/sub/node_modules/m.js", "/w/sub/tool"]
    assert sorted(tree.entries.values(), key=lambda entry: entry.path) == [
        Change("/w/run", "file", 0o755),
        Change("/w/sub/empty", "folder", 0o755),
        Change("/w/sub/link", "link", 0o777, "tool"),
        Change("/w/sub/tool", "file", 0o755),
    ]


def test_the_folder_of_a_task_is_the_images_own_unless_the_task_names_one(tmp_path: Path) -> None:
    plain = TASK_TOML.replace('workdir = "/app"\n', "")
    tasks = tmp_path / "tasks"
    stages = {"environment/Dockerfile": "FROM a AS b\nWORKDIR /build\nFROM c\nRUN make\n"}
    harbor(tasks, "built", plain + 'docker_image = "app:1"\n', **stages)
    harbor(tasks, "named", TASK_TOML + 'docker_image = "app:1"\n', **stages)
    harbor(
        tasks, "variable", plain, **{"environment/Dockerfile": "FROM a\nENV APP=/srv/w\nWORKDIR $APP\nCOPY . ./in\n"}
    )
    harbor(tasks, "base", plain, **{"environment/Dockerfile": "FROM a\nCOPY . .\n"})
    harbor(tasks, "lost", plain, **{"environment/Dockerfile": "FROM a\nCOPY . /app\n"})
    separate = plain.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
    separate = separate.replace('"1.4"\n', '"1.4"\nartifacts = ["/app/out"]\n') + 'docker_image = "app:1"\n'
    harbor(tasks, "artifacts", separate)
    suite, told = imported(tmp_path, "harbor", tasks)
    folders = {id: suite.task(id).repository for id in suite.ids()}
    assert folders == {"artifacts": "/app", "base": "", "built": "", "named": "/app", "variable": "/srv/w"}
    assert any(note.startswith("environment.workdir is not named: /app is taken") for note in told["notes"])
    assert list(suite.task("variable").files) == ["in/README.md"] and list(suite.task("base").files) == ["README.md"]
    reasons = {refusal["id"]: refusal["reason"] for refusal in told["refused"]}
    assert reasons["lost"] == (
        "environment/Dockerfile copies to /app/README.md, and names no WORKDIR; name its folder as environment.workdir"
    )
    assert list(reasons) == ["lost"]
