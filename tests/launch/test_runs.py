"""Run folders: found again by id or path, and only one run active in a folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.launch import runs
from headrace.launch.runs import RunError


def test_a_run_is_found_by_id_path_and_latest(tmp_path: Path) -> None:
    first = runs.create(tmp_path, "r1")
    second = runs.create(tmp_path, "r2")
    assert runs.find("r1", tmp_path).path == first.path
    assert runs.find(str(second.path), tmp_path).id == "r2"
    runs.create(tmp_path, "e3", newest=False)
    assert runs.find("latest", tmp_path).id == "r2"
    with pytest.raises(RunError, match="r1, r2"):
        runs.find("r3", tmp_path)


def test_only_one_run_is_active_and_a_dead_holder_frees_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from headrace.launch import runs\n"
        "handle = runs.lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"pid {holder.pid}") as caught:
            runs.lock(tmp_path)
        assert caught.value.exit_status == 5
        holder.kill()
        holder.wait()
    runs.lock(tmp_path).close()


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free >> 20
    runs.require_disk(tmp_path, free // 2)
    with pytest.raises(RunError, match=r"\d+ MiB free and a run needs") as caught:
        runs.require_disk(tmp_path, 2 * free)
    assert caught.value.exit_status == 3


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write to") as caught:
        runs.lock(tmp_path / "file")
    assert caught.value.exit_status == 3


def test_ids_are_legal_subject_tokens() -> None:
    assert runs.new_id(3).endswith("-s3")
    assert runs.new_id(3) == runs.new_id(3).lower()
