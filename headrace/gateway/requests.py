"""The JSON objects that users send to the gateway, with their bounds."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.archives.members import MAX_PATH, both_file_and_folder, safe_path
from headrace.messages.base import Share
from headrace.messages.product import Signal

MAX_FILES = 10_000
Thumb = Literal["up", "down"]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=2000)]


def refused_paths(paths: Iterable[str]) -> str | None:
    """The reason why a sandbox cannot hold files of these paths; None if it can."""
    paths = list(paths)
    unsafe = next((path for path in paths if not safe_path(path)), None)
    if unsafe is not None:
        return f"expected relative paths of UTF-8 without '..', at most {MAX_PATH} bytes long, got {unsafe[:80]!a}"
    both = both_file_and_folder(paths)
    return None if both is None else f"{both[:80]!a} is a file and the folder of another file"


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/sessions. With a `suite`: a run of headrace's own agent at one of its tasks, whose `prompt` and `files`
    may replace the task's files. Without: a session for the turns of a client's agent."""

    user: Annotated[str, Meta(max_length=256)] = ""
    suite: Annotated[str, Meta(max_length=256)] = ""
    task: Annotated[str, Meta(max_length=256)] = ""
    group: Annotated[str, Meta(max_length=256)] = ""
    """Of a client's session: the sessions of one task that are compared."""
    metadata: Annotated[dict[Name, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] = {}
    prompt: Annotated[str, Meta(max_length=65536)] = ""
    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    """Path to text."""

    def __post_init__(self) -> None:
        if self.suite and not (self.user and self.task):
            raise ValueError("expected `user` and `task` with `suite`")
        if not self.suite and (self.prompt or self.files):
            raise ValueError("`prompt` and `files` belong to a run of headrace's own agent: expected `suite` too")
        if self.suite and (self.group or self.metadata):
            raise ValueError("`group` and `metadata` belong to a client's session: expected no `suite`")
        if reason := refused_paths(self.files):
            raise ValueError(f"files: {reason}")


class NewRating(msgspec.Struct, frozen=True, kw_only=True):
    """POST .../feedback and .../reward, of a run of an agent and of a session."""

    thumb: Thumb | None = None
    diff: Literal["accepted", "rejected"] | None = None
    """Whether the user accepted or rejected the changes that the client showed."""
    undo: Literal[True] | None = None
    """The user took back changes that were accepted before."""
    reward: Share | None = None
    """A number from a program or a judge, 0 to 1."""
    comment: Text = ""

    def __post_init__(self) -> None:
        if (self.thumb, self.diff, self.undo, self.reward).count(None) != 3:
            raise ValueError(
                "expected one of thumb (up, down), diff (accepted, rejected), undo (true) and reward (0 to 1)"
            )

    @property
    def signal(self) -> Signal:
        """The name of the signal that was given."""
        if self.reward is not None:
            return "reward"
        return "thumb" if self.thumb else "diff" if self.diff else "undo"

    @property
    def given(self) -> Thumb:
        """The rating as a thumb."""
        good = self.thumb == "up" or self.diff == "accepted" or (self.reward is not None and self.reward >= 0.5)
        return "up" if good else "down"
