"""Agents of the product: headrace's own agent in a user's workspace."""

from typing import Literal

import msgspec

from headrace.messages.base import Amount, Integer, Message, Name, Seconds, Token, message
from headrace.messages.rollout import PolicyRef


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an agent, and its end."""

    id: str
    prompt: str
    state: Literal["RUNNING", "FINISHED", "ERROR", "CANCELLED"] = "RUNNING"
    created: Amount
    ended: Amount = 0.0
    detail: str = ""
    changed: tuple[str, ...] = ()
    """Paths that it wrote or deleted."""
    node: str = ""
    sandbox: str = ""
    restored: bool = False
    """The sandbox of the previous run was gone, so this run began with that run's files alone."""
    added: tuple[str, ...] = ()
    """Digests of the lines that a finished run added, for the signal `persistence`."""
    check_code: Integer | None = None
    """Exit code of the set's check on the files of a finished run; None where it was not run."""
    check_output: str = ""
    """The end of its output, or why it was not run."""


@message("agent")
class Agent(Message, frozen=True, kw_only=True):
    """An agent of the product: a workspace and the runs in it; a value in HR_SESSION."""

    id: str
    user: Token
    tenant: str
    training_allowed: bool
    policy: PolicyRef
    image: str = ""
    files: dict[str, bytes] = {}
    """The workspace after its last finished run; empty where it is too large to keep."""
    runs: tuple[AgentRun, ...]
    archived: bool = False
    webhook: str = ""
    webhook_secret: str = ""
    set_id: str = ""
    """The set that it works in side by side with others; empty: none."""
    prepared_node: str = ""
    """Of an agent of a set: the node of its sandbox before the first run."""
    prepared_sandbox: str = ""
    """Of an agent of a set: its fork of the prepared sandbox; empty where the backend cannot fork."""


@message("agent_set")
class AgentSet(Message, frozen=True, kw_only=True):
    """Agents that work side by side on one codebase, each in a copy of one prepared sandbox; a value in HR_SESSION."""

    id: str
    user: Token
    tenant: str
    agents: tuple[str, ...]
    files: dict[str, bytes] = {}
    """The workspace after the preparation, from which every agent began; empty where it is too large to keep."""
    complete: bool = True
    """False: `files` was too large to keep, so nothing can be compared after a restart of the gateway."""
    forked: bool = False
    """Every agent has a fork of the prepared sandbox; otherwise each has a sandbox of its own with its files."""
    check: str = ""
    """Shell command that tests an agent's work; empty: none."""
    setup: str = ""
    """Shell command that prepared the sandbox; empty: none."""
    node: str = ""
    sandboxes: tuple[str, ...] = ()
    """The forks, in the order of the agents."""


@message("workspace_command")
class WorkspaceCommand(Message, frozen=True, kw_only=True):
    """Run a command in a new sandbox, then make copies of it; asked of a rollout actor of the production lane, by
    request and reply. The sandbox itself is released. Answered with a WorkspaceReport."""

    run: str
    name: Name
    """``<user hash>.<id>``: the group of the sandbox's key."""
    image: str = ""
    files: dict[str, bytes] = {}
    command: str = ""
    """For ``sh -c``; empty: none."""
    timeout_s: Seconds = 120.0
    copies: tuple[Name, ...] = ()
    """Workspaces that begin in a fork of the sandbox (`Workspace.name`), and the files are pulled for them."""
    hold_s: Seconds = 0.0
    """How long a fork is held for its first attempt."""


@message("workspace_report")
class WorkspaceReport(Message, frozen=True, kw_only=True):
    """The answer to a WorkspaceCommand."""

    code: Integer = 0
    output: str = ""
    """The end of stdout and stderr."""
    files: dict[str, bytes] = {}
    """The workspace after the command; only where copies were asked for and the command succeeded."""
    node: str = ""
    sandboxes: tuple[str, ...] = ()
    """The forks, in the order of `copies`. Empty where the backend cannot fork: then only the files are copied."""
    failed: str = ""
    """Why the command was not run, or the copies were not made."""
