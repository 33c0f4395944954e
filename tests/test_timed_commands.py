"""The time limit of a command ends the command's children too, and so does the end of this process."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import timed_commands

# The grandchild does not hold the pipes and outlasts the limit of a test: nothing but a signal ends it. The child waits
# for it.
COMMAND = "sleep 3600 <&- >/dev/null 2>&1 & echo $! >{file}; wait"

PARENT = """
import sys
from headrace import timed_commands
timed_commands.run(["sh", "-c", "echo $$ >" + sys.argv[1] + "; exec sleep 300"], 300.0)
"""


def test_the_limit_ends_the_children_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    limit_s = 0.3
    while not file.exists() or not file.read_text():  # a busy machine has not started the child at the first limit
        with pytest.raises(subprocess.TimeoutExpired):
            timed_commands.run(["sh", "-c", COMMAND.format(file=file)], limit_s)
        limit_s *= 4
    _ended(int(file.read_text()))


def test_children_end_with_a_command_that_ends_in_time(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    done = timed_commands.run(["sh", "-c", COMMAND.format(file=file).replace("wait", "cat")], 60.0, data=b"in")
    assert (done.returncode, done.stdout) == (0, b"in")
    _ended(int(file.read_text()))


def test_the_limit_counts_for_a_child_that_holds_the_output() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        timed_commands.run(["sh", "-c", "sleep 300 & exit 0"], 0.3)


@pytest.mark.parametrize(("end_s", "traces"), [(0.0, ["file"]), (60.0, ["ended"])])
def test_a_command_that_may_end_by_itself_removes_its_files(tmp_path: Path, end_s: float, traces: list[str]) -> None:
    command = f"cd {tmp_path}; trap 'mv file ended; exit' TERM; touch file; sleep 3600 & wait"
    limit_s = 0.3
    while not list(tmp_path.iterdir()):  # a busy machine has not started the command at the first limit
        with pytest.raises(subprocess.TimeoutExpired):
            timed_commands.run(["sh", "-c", command], limit_s, end_s=end_s)
        limit_s *= 4
    assert [path.name for path in tmp_path.iterdir()] == traces


def test_a_command_ends_with_a_killed_process(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", PARENT, str(fifo)]) as parent:
        pid = int(fifo.read_text())
        parent.send_signal(signal.SIGKILL)
    _ended(pid)


def test_a_program_that_cannot_be_started_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    absent, refused = FileNotFoundError, PermissionError
    for name, error in (("no-such-program", absent), ("./no-such-file", absent), ("./text", refused)):
        with pytest.raises(error, match=name):
            timed_commands.run([name], 10.0, cwd=tmp_path)


def test_a_command_has_its_arguments_environment_folder_and_limit(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "program"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@" "$A" "$(/bin/pwd)" "$(ulimit -t)" "$(ulimit -Ht)"\nexit 7\n')
    program.chmod(0o755)
    environment = {"PATH": str(program.parent), "A": "1"}
    words = ["-x", "a b", "$A", "", "\udcff"]
    for name in ("program", "bin/program"):
        done = timed_commands.run([name, *words], 10.5, cwd=tmp_path, env=environment)
        printed = os.fsdecode(done.stdout).split("|")
        assert (done.returncode, printed) == (7, [str(program), *words, "1", str(tmp_path), "11", "11", ""])
        assert done.args == [name, *words] and not done.stderr
    environment_of_it = timed_commands.run(["env"], 10.0, env={"PATH": "/usr/bin:/bin", "A": "1"}).stdout
    assert sorted(environment_of_it.split()) == [b"A=1", b"PATH=/usr/bin:/bin"]


def _ended(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], 20)[0], "a child outlived its command"
    finally:
        os.close(process)
