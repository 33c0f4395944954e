"""Sessions of the product lane as the streams tell them: a gateway that restarts knows all of them again."""

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import Any

from headrace.messages.rollout import RolloutRequest, Trajectory, TurnDone, TurnSampled


class Session:
    """One user's request: its state, its turns, its result."""

    def __init__(self, request: RolloutRequest, started: float) -> None:
        self.request = request
        self.started = started
        self.ended = 0.0
        self.state = "queued"
        self.turns: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.trajectory = ""
        self.changed = asyncio.Event()

    def touch(self) -> None:
        """Wake everybody who waits for news."""
        self.changed.set()
        self.changed = asyncio.Event()

    def on_turn(self, record: TurnSampled | TurnDone) -> None:
        """A turn began or ended."""
        if self.state == "queued":
            self.state = "running"
        if isinstance(record, TurnSampled):
            calls = [
                {"name": call.name, "arguments": call.arguments, "error": call.error} for call in record.turn.calls
            ]
            self.turns.append({"index": record.turn.index, "calls": calls, "results": []})
        else:
            for turn in self.turns:
                if turn["index"] == record.index:
                    turn["results"] = [{"ok": result.ok, "output": result.output} for result in record.results]
        self.touch()

    def on_trajectory(self, trajectory: Trajectory, time_s: float) -> None:
        """It is done: the changed files are the answer."""
        self.state = "finished"
        self.ended = time_s
        self.trajectory = trajectory.id
        self.result = {
            "outcome": trajectory.outcome,
            "files": {path: data.decode("utf-8", "replace") for path, data in trajectory.diff.items()},
            "deleted": list(trajectory.deleted),
        }
        self.touch()

    def on_failure(self, reason: str) -> None:
        """Our own parts failed it for good."""
        self.state = "failed"
        self.ended = time.time()
        self.result = {"reason": reason}
        self.touch()

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in {"finished", "failed"}

    def view(self) -> dict[str, Any]:
        """What the user sees."""
        return {
            "session": self.request.group,
            "state": self.state,
            "turns": self.turns,
            "result": self.result,
            "seconds": (self.ended or time.time()) - self.started,
        }


class UserKeys:
    """Names users on the bus by a keyed hash; the key stays in a file of mode 0600 and never travels."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        self._key = path.read_bytes()

    def hash(self, tenant: str, user: str) -> str:
        """The user's name on the bus: 20 hexadecimal digits of an HMAC-SHA256."""
        return hmac.new(self._key, f"{tenant}\0{user}".encode(), hashlib.sha256).hexdigest()[:20]
