"""The command `headrace` as a user runs it, with everything that it keeps below one folder."""

import json
import subprocess
from pathlib import Path

from headrace.python_modules import module_command
from tests.support.paths import ROOT


def headrace(folder: Path, *words: str, **settings: object) -> str:
    """The output of a command that must succeed. settings: configuration keys with their values."""
    places = {"environment.cache_dir": folder / "cache", "tasks.dir": folder / "suites", "run.dir": folder / "runs"}
    values = {key: str(value) for key, value in places.items()} | settings
    options = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = module_command("headrace.cli", *words, *options)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
