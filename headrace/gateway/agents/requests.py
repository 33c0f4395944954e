"""The JSON objects of the agents API with their limits, and its error."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.gateway.http import HttpRefused
from headrace.gateway.requests import MAX_FILES, Text

Prompt = Annotated[str, Meta(min_length=1, max_length=65536)]


class AgentRefused(HttpRefused):
    """A refusal with an error code of the agents API."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(status, text)
        self.api_code = code


class GitSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A repository that the gateway clones."""

    url: Annotated[str, Meta(max_length=2000)]
    ref: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,200}$")] | None = None


class WorkspaceSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of an agent's files (at most one of files, tar, bundle and git) and the image of its machine."""

    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    """Path to text."""
    tar: bytes = b""
    """Base64 of a tar file, compressed or not."""
    bundle: bytes = b""
    """Base64 of a git bundle; its HEAD is checked out."""
    git: GitSource | None = None
    image: Text = ""
    """A container image in the nodes' image stores; empty: the default machine without an image."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address to which the end of every run is posted."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s]+$", max_length=2000)]
    secret: Annotated[str, Meta(min_length=16, max_length=256)]


class NewAgent(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/agents."""

    prompt: Prompt
    user: Text = ""
    workspace: WorkspaceSource = WorkspaceSource()
    webhook: Webhook | None = None
    n: Annotated[int, Meta(ge=1, le=8)] = 1
    """Agents that work on the prompt side by side, each in a copy of one prepared sandbox."""
    setup: Text = ""
    """Shell command that prepares the sandbox before it is copied."""
    check: Text = ""
    """Shell command that tests the work of each agent, in a new sandbox with its files after `setup`."""

    @property
    def side_by_side(self) -> bool:
        """Whether this asks for a set of agents."""
        return self.n > 1 or bool(self.setup or self.check)


class Merge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/agent-sets/ID/merge."""

    agent: Annotated[str, Meta(max_length=64)]
    """The agent whose work is merged."""
    onto: WorkspaceSource | None = None
    """The codebase now; None: the files that the agents began with."""
    onto_agent: Annotated[str, Meta(max_length=64)] = ""
    """Another agent of the set, whose work is the codebase."""


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/agents/ID/runs."""

    prompt: Prompt


class LaterFiles(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/agents/ID/runs/RID/lines: the files that a run changed, as they are now."""

    at: Literal["10m", "24h", "merge"]
    files: Annotated[dict[str, str], Meta(max_length=MAX_FILES)] = {}
    """Path to text; a file that is gone is left out."""


def host_of(url: str) -> str | None:
    """The host of an address; None where it has none, and where programs may read another one in it."""
    try:
        return urlsplit(url).hostname if url.isascii() and url.isprintable() and not {" ", "\\"} & set(url) else None
    except ValueError:  # such as an unclosed bracket
        return None
