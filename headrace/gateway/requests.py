"""The JSON objects that users send to the gateway, with their bounds."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.archives.members import MAX_PATH, both_file_and_folder, safe_path

MAX_FILES = 10_000

Name = Annotated[str, Meta(min_length=1, max_length=256)]


def refused_paths(paths: Iterable[str]) -> str | None:
    """The reason why a sandbox cannot hold files of these paths; None if it can."""
    paths = list(paths)
    unsafe = next((path for path in paths if not safe_path(path)), None)
    if unsafe is not None:
        return f"expected relative paths of UTF-8 without '..', at most {MAX_PATH} bytes long, got {unsafe[:80]!a}"
    both = both_file_and_folder(paths)
    return None if both is None else f"{both[:80]!a} is a file and the folder of another file"


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions: a task for the agent. `prompt` and `files`, if given, replace those of the task."""

    user: Name
    suite: Name
    task: Name
    prompt: Annotated[str, Meta(max_length=65536)] = ""
    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    """Path to text."""

    def __post_init__(self) -> None:
        if reason := refused_paths(self.files):
            raise ValueError(f"files: {reason}")


class NewFeedback(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions/ID/feedback: a user's judgement of a finished session."""

    thumb: Literal["up", "down"]
    comment: Annotated[str, Meta(max_length=2000)] = ""
