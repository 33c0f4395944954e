"""Programs that headrace starts take no module from the working directory."""

import re
import subprocess
from pathlib import Path

import headrace
from headrace import __version__
from headrace.python_modules import module_command

PACKAGE = Path(headrace.__file__).parent


def test_a_clone_in_the_working_directory_does_not_take_the_place_of_the_package(tmp_path: Path) -> None:
    """Python asks the finder of an editable installation last, also after a folder without `__init__.py`."""
    (tmp_path / "headrace" / "headrace").mkdir(parents=True)
    (tmp_path / "argparse.py").write_text("raise SystemExit('a file of the working directory ran')\n")
    done = subprocess.run(
        module_command("headrace.cli", "--version"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and __version__ in done.stdout


def test_no_module_is_started_in_another_way() -> None:
    by_hand = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r'executable,\s*\*?\(?"-m"', path.read_text(encoding="utf-8"))
    ]
    assert by_hand == []
