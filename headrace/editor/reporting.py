"""Reports to the gateway which lines of its agents a git repository still has: after 10 minutes, 24 hours, at merge.

A file in the git folder lists the followed runs. `headrace lines` sends the reports that are due; a git hook
calls it after a merge.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from headrace.editor.api import AgentsApi, AgentsApiError
from headrace.errors import WRONG_INPUT, HeadraceError

NOTES = "headrace-lines.json"
MOMENTS = {"10m": 600.0, "24h": 86400.0}
"""Name to seconds after the run was noted."""
GIVE_UP_S = 7 * 86400.0
"""Seconds after which a run that could not be reported is no longer followed."""
HOOK = "post-merge"
HOOK_LINE = "headrace lines --merged"


class LinesError(HeadraceError, exit_status=WRONG_INPUT):
    """The repository cannot be used; the text says what to do."""


class Noted(msgspec.Struct, kw_only=True):
    """A run whose lines are followed."""

    url: str
    agent: str
    run: str
    since: float
    """Seconds since the epoch."""
    reported: list[str] = []

    def due(self, now: float, merged: bool) -> list[str]:
        """The moments that are due and were not reported."""
        moments = [moment for moment, seconds in MOMENTS.items() if now - self.since >= seconds]
        moments += ["merge"] if merged else []
        return [moment for moment in moments if moment not in self.reported]

    @property
    def over(self) -> bool:
        """Whether a final outcome was reported."""
        return bool({"24h", "merge"} & set(self.reported))


class Repository:
    """A git repository with noted runs."""

    def __init__(self, folder: Path) -> None:
        """folder: inside the repository. LinesError when there is none."""
        try:
            words = ("git", "-C", str(folder), "rev-parse", "--absolute-git-dir", "--show-toplevel")
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise LinesError(f"{folder} is not inside a git work tree: {error}") from None
        git, top = done.stdout.splitlines()
        self._git, self._top = Path(git), Path(top)

    def noted(self) -> list[Noted]:
        """The runs whose final outcome is still to be reported. LinesError."""
        path = self._git / NOTES
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Noted])
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            raise LinesError(f"{path} is damaged ({error}): remove it") from None

    def note(self, noted: Noted) -> None:
        """Follow the lines of a run from now on."""
        self._write([each for each in self.noted() if each.run != noted.run] + [noted])

    def _write(self, entries: list[Noted]) -> None:
        new = self._git / f"{NOTES}.{os.getpid()}"
        new.write_bytes(msgspec.json.encode(entries))
        new.replace(self._git / NOTES)

    def install_hook(self) -> Path:
        """Install the hook that reports after a merge. LinesError if the repository has another post-merge hook."""
        path = self._git / "hooks" / HOOK
        if path.exists() and HOOK_LINE not in path.read_text(errors="replace"):
            raise LinesError(f"{path} exists: add the line `{HOOK_LINE}` to it")
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(f"#!/bin/sh\n# A merge must not fail because the gateway is away.\n{HOOK_LINE} || true\n")
            path.chmod(0o755)
        return path

    async def report(self, api: AgentsApi, url: str, *, merged: bool) -> list[dict[str, Any]]:
        """Send the due reports to one gateway; return its answers. Runs with a final outcome are no longer followed."""
        answers, entries, now = [], self.noted(), time.time()
        for noted in entries:
            where = f"/v1/agents/{noted.agent}/runs/{noted.run}"
            for moment in noted.due(now, merged) if noted.url == url else ():
                try:
                    changed = (await api.call("GET", where))["changed"]
                    files = {path: text for path in changed if (text := self._text(path)) is not None}
                    answers.append(await api.call("POST", f"{where}/lines", {"at": moment, "files": files}))
                except AgentsApiError as error:  # the other runs are reported; this one is tried again
                    answers.append({"id": noted.run, "at": moment, "error": str(error)})
                    continue
                noted.reported.append(moment)
        self._write([noted for noted in entries if not noted.over and now - noted.since < GIVE_UP_S])
        return answers

    def _text(self, path: str) -> str | None:
        """A file of the work tree as text; None if it does not exist, is not text or is outside the tree."""
        file = (self._top / path).resolve()
        if not file.is_relative_to(self._top.resolve()):
            return None
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return None
