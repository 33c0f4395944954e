"""An import keeps modes, links and empty folders of a repository, and says what it leaves out."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from headrace.cli.main import main
from headrace.config import Environment
from headrace.judging import HostMachines
from headrace.judging.certifying import certify
from headrace.messages.codec import encode
from headrace.messages.tasks import Change, Task
from headrace.tasks.exporting.harbor import folder_of
from headrace.tasks.importing import patches, swebench, trees
from headrace.tasks.importing.base import ImportRefused
from headrace.vmhost.node.host import Host
from tests.support import rows
from tests.support.playing import played, report
from tests.tasks.importing.test_importing import imported, jsonl

pytestmark = pytest.mark.anyio
HIDDEN = """import os

import pytest


def test_fixed():
    assert os.access("run.sh", os.X_OK) and os.access("bin/tool", os.X_OK) and os.access("bin/more", os.X_OK)
    assert not os.access("plain.sh", os.X_OK)
    assert os.readlink("latest") == "bin/more" and os.readlink("kept") == "bin"
    assert open("new name \\u00e4.txt").read() == "1\\n2\\n3\\n" and not os.path.lexists("old \\u00e4.txt")
    assert open("was_link").read() == "a file\\n" and os.readlink("was_file") == "bin/tool"
    assert not os.path.exists("tests/conftest.py") and os.access("tests/helper", os.X_OK)


@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    assert os.access("run.sh", os.X_OK) and 0


def test_same():
    assert os.path.isdir("kept")
"""


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


def odd_repository(repos: Path) -> dict[str, Any]:
    """A checkout with programs, links, a submodule and odd names, and a row whose patches change all of them."""
    folder = repos / "owner__odd"
    folder.mkdir(parents=True)
    rows.git(folder, "init", "-q")
    texts = {"bin/tool": "#!/bin/sh\n", "run.sh": "true\n", "plain.sh": "true\n", "old ä.txt": "1\n2\n3\n"}
    rows.write(folder, texts | {"was_file": "x\n", "tests/conftest.py": "1 / 0\n", "tests/helper": "x\n"})
    for path in ("bin/tool", "plain.sh"):
        (folder / path).chmod(0o755)
    for path, target in (("latest", "bin/tool"), ("kept", "bin"), ("was_link", "bin/tool")):
        (folder / path).symlink_to(target)
    rows.write(
        folder, {"data/model.bin": f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"}
    )
    rows.git(folder, "add", "-A")
    rows.git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendor/lib")
    rows.git(folder, "commit", "-qm", "base")
    base = rows.git(folder, "rev-parse", "HEAD").strip()

    (folder / "run.sh").chmod(0o755)
    (folder / "plain.sh").chmod(0o644)
    rows.write(folder, {"bin/more": "#!/bin/sh\n"})
    (folder / "bin/more").chmod(0o755)
    (folder / "old ä.txt").rename(folder / "new name ä.txt")
    for path in ("latest", "was_link", "was_file"):
        (folder / path).unlink()
    (folder / "latest").symlink_to("bin/more")
    (folder / "was_file").symlink_to("bin/tool")
    (folder / "was_link").write_text("a file\n")
    patch = difference(folder)
    rows.write(folder, {"tests/test_odd.py": HIDDEN})
    (folder / "tests/helper").chmod(0o755)
    (folder / "tests/conftest.py").unlink()
    return {
        "instance_id": "owner__odd-1",
        "repo": "owner/odd",
        "base_commit": base,
        "problem_statement": "make it so",
        "patch": patch,
        "test_patch": difference(folder),
        "FAIL_TO_PASS": ["tests/test_odd.py::test_fixed", "tests/test_odd.py::test_expected_to_fail"],
        "PASS_TO_PASS": ["tests/test_odd.py::test_same"],
    }


def difference(folder: Path) -> str:
    """The changes since the commit, as git writes them, and the commit again."""
    rows.git(folder, "add", "-A", ":!vendor")
    patch = rows.git(folder, "diff", "--cached", "-M")
    rows.git(folder, "reset", "-q", "--hard")
    return patch


async def test_modes_links_renames_and_deletions_of_a_row_are_made(host: Host, tmp_path: Path) -> None:
    row = odd_repository(tmp_path / "repos")
    assert "rename from" in row["patch"] and '"old \\303\\244.txt"' in row["patch"]
    suite, told = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    assert told["refused"] == [] and told["notes"] == {
        "submodules are left out: 1, vendor/lib": 1,
        "contents of files in Git LFS are left out: 1, data/model.bin": 1,
    }
    task, oracle = suite.task("owner__odd-1"), suite.oracle("owner__odd-1")
    assert task.entries == (
        Change("bin/tool", "file", 0o755),
        Change("kept", "link", 0o777, "bin"),
        Change("latest", "link", 0o777, "bin/tool"),
        Change("plain.sh", "file", 0o755),
        Change("was_link", "link", 0o777, "bin/tool"),
    )
    assert Change("tests/conftest.py", "gone") in (oracle.entries or ())
    assert sorted(patches.paths_of(row["patch"]))[-3:] == ["run.sh", "was_file", "was_link"]
    gold = await played(host, suite, "owner__odd-1", "oracle")
    assert gold.decision == "passed", gold
    assert (await played(host, suite, "owner__odd-1", "idle")).decision == "failed"
    made = await certify(suite, "owner__odd-1", HostMachines(host), report, backend=host.backend)
    assert (made.gold_passed, made.noop, made.leaks) == (5, "failed", ()), made
    assert "import: submodules are left out: 1, vendor/lib" in made.notes
    folder = folder_of(task, oracle)
    assert Change("environment/repository/latest", "link", 0o777, "bin/tool") in folder.entries
    assert Change("tests/files/tests/helper", "file", 0o755) in folder.entries


def test_a_task_without_entries_is_encoded_as_before(tmp_path: Path) -> None:
    row = rows.repository(tmp_path / "repos")
    suite, _ = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    (id,) = suite.ids()
    task, oracle = suite.task(id), suite.oracle(id)
    assert task.entries is UNSET and oracle.entries is UNSET and oracle.left_out is UNSET
    for side in (task, oracle):
        assert b"entries" not in encode(side)[0] and b"left_out" not in encode(side)[0]
    assert Task.__struct_fields__.index("entries") == len(Task.__struct_fields__) - 1


def test_a_folder_is_read_with_modes_links_and_empty_folders(tmp_path: Path) -> None:
    rows.write(tmp_path, {"a/run": "x", "a/.git/config": "", "node_modules/x/i.js": "1", "p/__pycache__/a.pyc": ""})
    (tmp_path / "a/run").chmod(0o755)
    (tmp_path / "empty/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    tree = trees.read(tmp_path)
    assert tree.files == {"a/run": b"x", "node_modules/x/i.js": b"1"}
    assert tree.entries == {
        "a/run": Change("a/run", "file", 0o755),
        "empty/inner": Change("empty/inner", "folder", 0o755),
        "link": Change("link", "link", 0o777, "a"),
        "p": Change("p", "folder", 0o755),
    }
    assert tree.notes == (
        "folders of history are left out: 1, a/.git",
        "folders of compiled files are left out: 1, p/__pycache__",
        "pipes, sockets and devices are left out: 1, pipe",
    )


PATHS = [
    ('diff --git "a/\\303\\244 b/x" "b/\\303\\244 b/x"\nold mode 100644\nnew mode 100755\n', ("ä b/x",)),
    ("diff --git a/a b/c b/a b/c\nold mode 100644\nnew mode 100755\n", ("a b/c",)),
    (
        "diff --git a/x y b/x y\nindex 1..2 100644\n--- a/x y\t\n+++ b/x y\t\n@@ -1 +1 @@\n--- a/no\n+++ b/no\n",
        ("x y",),
    ),
    ("diff --git a/e b/e\nnew file mode 100644\nindex 0000000..e69de29\n", ("e",)),
    ("diff --git i/n w/n\n--- i/n\n+++ w/n\n@@ -1 +1 @@\n-1\n+2\n", ("n",)),
    (
        'diff --git "a/t\\tq\\"\\\\" b/z\nsimilarity index 100%\nrename from "t\\tq\\"\\\\"\nrename to z\n',
        ('t\tq"\\', "z"),
    ),
]


@pytest.mark.parametrize(("patch", "paths"), PATHS)
def test_the_paths_of_a_patch_are_those_that_git_means(patch: str, paths: tuple[str, ...]) -> None:
    assert patches.paths_of(patch) == paths


def test_deleted_and_renamed_tests_are_no_arguments_of_an_images_test_command(tmp_path: Path) -> None:
    row = odd_repository(tmp_path / "repos")
    suite, _ = imported(tmp_path, "swebench", jsonl(tmp_path, row))
    script = suite.oracle("owner__odd-1").hidden[".headrace/eval.sh"].decode()
    assert f"{swebench._PYTEST} tests/test_odd.py\n" in script
    assert "for path in tests/conftest.py tests/helper tests/test_odd.py; do git checkout" in script
    move = "diff --git a/t/a.py b/t/b.py\nsimilarity index 100%\nrename from t/a.py\nrename to t/b.py\n"
    assert patches.names_of(move + PATHS[3][0]) == (("t/a.py", "t/b.py"), ("", "e"))


def test_a_patch_changes_no_path_outside_and_no_submodule() -> None:
    tree = trees.Tree({"a": b"1\n"}, {"out": Change("out", "link", 0o777, "/tmp")})
    change = "--- {0}\n+++ {0}\n@@ -1 +1 @@\n-1\n+2\n"
    for patch, why in (
        ("diff --git a/../a b/../a\n" + change.format("a/../a"), "expected a path of UTF-8 inside the repository"),
        (
            "diff --git a/s b/s\nnew file mode 160000\nindex 0..1\n--- /dev/null\n+++ b/s\n@@ -0,0 +1 @@\n+x\n",
            "submodule",
        ),
        (
            "diff --git a/out/x b/out/x\nnew file mode 100644\n--- /dev/null\n+++ b/out/x\n@@ -0,0 +1 @@\n+x\n",
            "beyond a",
        ),
        ("no patch", "is not a git patch"),
    ):
        with pytest.raises(ImportRefused, match=why):
            trees.apply(tree, patch, "the patch")


def test_a_plain_folder_does_not_stand_for_a_commit(tmp_path: Path) -> None:
    row = rows.repository(tmp_path / "repos") | {"base_commit": "f" * 40}
    _, told = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"), code=1)
    assert "has no commit ffffffff" in told["refused"][0]["reason"]
    plain = tmp_path / "plain"
    rows.write(plain / "owner__calc", {"calc/core.py": rows.CALC, "tests/test_core.py": rows.VISIBLE})
    _, told = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(plain), code=1)
    assert "is no git checkout, so nothing shows that it holds commit ffff" in told["refused"][0]["reason"]
    rows.write(plain / "owner__calc", {"calc/__init__.py": "", "calc/old.py": rows.OLD})
    (plain / "owner__calc").rename(plain / f"owner__calc@{'f' * 40}")
    _, told = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(plain))
    assert told["tasks"] == 1


def test_a_parser_of_another_runner_needs_the_rows_own_script(tmp_path: Path) -> None:
    row = rows.repository(tmp_path / "repos")
    scripts = {"go": {"eval_script": "#!/bin/bash\ngo test -v ./...\n"}, "none": {}, "django": {}}
    made = [row | {"instance_id": name, "log_parser": "parse_log_gotest"} | extra for name, extra in scripts.items()]
    made[2]["log_parser"] = "parse_log_django"
    suite, told = imported(tmp_path, "swebench", jsonl(tmp_path, *made))
    assert list(suite.ids()) == ["go"] and "pytest" not in str(suite.task("go").tests.argv)
    assert [refusal["id"] for refusal in told["refused"]] == ["none", "django"]
    assert all("the row has no eval_script" in refusal["reason"] for refusal in told["refused"])
    _, told = imported(tmp_path, "swebench", jsonl(tmp_path, *made), "--repos", str(tmp_path / "repos"), code=1)
    assert [refusal["id"] for refusal in told["refused"]] == ["go", "none", "django"]


def test_rows_whose_paths_contradict_each_other_are_refused_by_name(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "x", "test_command": "true"}
    bad = [
        row | {"id": "files", "files": {"a": "1", "a/b": "2"}},
        row | {"id": "hidden", "files": {"a/b": "2"}, "hidden": {"a": "1"}},
        row | {"id": "solution", "files": {"a": "1"}, "solution": {"a/b/c": "1"}},
        row | {"id": "dots", "files": {"a/./b": "1"}},
    ]
    _, told = imported(tmp_path, "jsonl", jsonl(tmp_path, *bad, row | {"id": "good", "files": {"a": "1", "ab": "2"}}))
    reasons = {refusal["id"]: refusal["reason"] for refusal in told["refused"]}
    assert list(reasons) == ["files", "hidden", "solution", "dots"] and told["tasks"] == 1
    assert all("'a' is a file and the folder of another one" in reasons[id] for id in list(reasons)[:3])
    assert json.loads((tmp_path / "suites" / "jsonl" / "import.json").read_text())["tasks"] == 1


@pytest.mark.slow
async def test_an_exported_task_comes_back_with_all_that_was_kept(host: Host, tmp_path: Path) -> None:
    row, suites = odd_repository(tmp_path / "repos"), ["--set", f"tasks.dir={tmp_path / 'suites'}"]
    suite, _ = imported(tmp_path, "swebench", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    assert main(["tasks", "export", "swebench", str(tmp_path / "out"), *suites]) == 0
    assert (tmp_path / "out/owner__odd-1/environment/repository/latest").readlink() == Path("bin/tool")
    assert os.access(tmp_path / "out/owner__odd-1/environment/repository/bin/tool", os.X_OK)
    back, told = imported(tmp_path, "harbor", tmp_path / "out", "--template", "debian")
    assert told["refused"] == []
    before, after = suite.task("owner__odd-1"), back.task("owner__odd-1")
    assert (after.files, after.entries) == (before.files, before.entries)
    assert (await played(host, back, "owner__odd-1", "oracle")).decision == "passed"
    assert (await played(host, back, "owner__odd-1", "idle")).decision == "failed"


@pytest.mark.slow
async def test_a_bug_of_swesmith_in_modes_and_links_is_undone(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "repos" / "owner__odd.12345678"
    folder.mkdir(parents=True)
    rows.git(folder, "init", "-q")
    test = """import os


def test_odd():
    assert os.access("tool", os.X_OK) and not os.access("plain", os.X_OK) and os.readlink("link") == "tool"
    assert os.readlink("was") == "plain" and not os.path.lexists("made") and os.access("lost", os.X_OK)
"""
    rows.write(folder, {"tool": "1\\n", "plain": "2\\n", "lost": "3\\n", "tests/test_odd.py": test})
    for path in ("tool", "lost"):
        (folder / path).chmod(0o755)
    for path, target in (("link", "tool"), ("was", "plain")):
        (folder / path).symlink_to(target)
    rows.git(folder, "add", "-A")
    rows.git(folder, "commit", "-qm", "base")
    commit = rows.git(folder, "rev-parse", "HEAD").strip()
    (folder / "tool").chmod(0o644)
    (folder / "plain").chmod(0o755)
    for path in ("lost", "link", "was"):
        (folder / path).unlink()
    (folder / "link").symlink_to("plain")
    (folder / "made").symlink_to("tool")
    (folder / "was").write_text("a file")
    row = {
        "instance_id": "owner__odd.12345678.x",
        "repo": "swesmith/owner__odd.12345678",
        "base_commit": commit,
        "problem_statement": "modes are wrong",
        "patch": difference(folder),
        "FAIL_TO_PASS": ["tests/test_odd.py::test_odd"],
        "PASS_TO_PASS": [],
    }
    suite, told = imported(tmp_path, "swesmith", jsonl(tmp_path, row), "--repos", str(tmp_path / "repos"))
    assert told["refused"] == []
    (id,) = suite.ids()
    assert Change("link", "link", 0o777, "plain") in (suite.task(id).entries or ())
    assert (await played(host, suite, id, "oracle")).decision == "passed"
    assert (await played(host, suite, id, "idle")).decision == "failed"
    made = await certify(suite, id, HostMachines(host), report, backend=host.backend)
    assert (made.gold_passed, made.noop) == (5, "failed"), made
