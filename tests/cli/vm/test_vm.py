"""`headrace vm`: images, sandboxes by hand, what the cache holds."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.support.archives import docker_save, file, folder
from tests.support.paths import ROOT

CACHE = f"environment.cache_dir={json.dumps(str(ROOT / '.cache' / 'headrace'))}"


def test_an_image_is_imported_shown_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")  # an entry that is reached by a link is referenced too
    here = ("--set", f"environment.cache_dir={json.dumps(str(tmp_path / 'link'))}")
    image = docker_save(tmp_path / "a.tar", [[folder("bin"), file("bin/sh", b"x" * 70_000)]], WorkingDir="/app")
    assert main(["images", str(image), "--name", "mine", *here]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["workdir"], told["entries"]) == ("mine", "/app", 2)
    (tmp_path / "cache" / "making-old").mkdir()
    assert main(["vm", "gc", "--dry-run", *here]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["keep", "drop", "keep"]
    assert "layers of images" in lines[0] and "image mine" in lines[2]
    assert main(["vm", "gc", "--dry-run", "--forget", "mine", *here]) == 2
    assert "--forget: not allowed with argument --dry-run" in capsys.readouterr().err
    assert main(["vm", "gc", "--forget", "mine/blob", *here]) == 3
    assert "no image 'mine/blob'" in capsys.readouterr().err
    assert main(["vm", "gc", "--forget", "mine", *here]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("MiB freed")
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"lock", "probe.json"}


@pytest.mark.vm
def test_a_command_runs_in_a_fresh_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "in.txt").write_text("given\n")
    command = ["sh", "-c", "cat in.txt; echo $WHO >&2; echo made > out.txt; exit 7"]
    how = ["--push", str(tmp_path / "tree"), "--pull", str(tmp_path / "out.tar"), "--env", "WHO=me", "--set", CACHE]
    assert main(["vm", "run", *how, "--", *command]) == 7
    said = capsys.readouterr()
    *building, last = said.err.splitlines()  # the first command on a host also says that it builds the template
    assert said.out.endswith("given\n") and last == "me" and all(line.startswith("headrace: ") for line in building)
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert sorted(tar.getnames()) == ["in.txt", "out.txt"]


@pytest.mark.vm
@pytest.mark.slow
def test_a_shell_takes_what_is_typed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "vm", "run", "--terminal", "--set", CACHE],
        input="echo $((6 * 7)); tty; exit 3\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 3, done.stderr
    assert "42" in done.stdout and "/dev/pts/" in done.stdout


@pytest.mark.vm
@pytest.mark.slow
def test_ctrl_c_goes_to_the_job_and_the_second_ends_it() -> None:
    """Ctrl-C as a terminal sends it, to every process of the group. The machine must not get the signal."""
    stubborn = "trap 'echo heard' INT; echo ready; while :; do sleep 0.1; done"
    words = [sys.executable, "-m", "headrace.cli", "vm", "run", "--set", CACHE, "--", "sh", "-c", stubborn]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None
        for line in ("ready\n", "heard\n"):
            while process.stdout.readline() != line:
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 137
