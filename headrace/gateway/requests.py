"""The JSON objects that users send to the gateway, with their bounds."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_FILES = 10_000
MAX_PATH = 1024

Name = Annotated[str, Meta(min_length=1, max_length=256)]


def safe_path(path: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return 0 < len(path) <= MAX_PATH and "\0" not in path and not {"", ".", ".."} & {*path.split("/")}


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions: a task for the agent. `prompt` and `files`, if given, replace those of the task."""

    user: Name
    suite: Name
    task: Name
    prompt: Annotated[str, Meta(max_length=65536)] = ""
    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    """Path to text."""

    def __post_init__(self) -> None:
        for path in self.files:
            if not safe_path(path):
                raise ValueError(f"files: expected relative paths without '..', got {path[:80]!a}")


class NewFeedback(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions/ID/feedback: a user's judgement of a finished session."""

    thumb: Literal["up", "down"]
    comment: Annotated[str, Meta(max_length=2000)] = ""
