"""The sandbox contract: results of operations, and the requests that carry operations to an environment actor.

Harness, tasks and judge program against `Sandbox`, whatever backend implements it.
"""

import hashlib
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.errors import HeadraceError
from headrace.messages.base import Count, Finite, Integer, Message, Seconds, Seed, message
from headrace.messages.plugins import Plugin
from headrace.messages.sandbox.operations import Op
from headrace.messages.tasks import Change, SandboxLimits

Role = Literal["rollout", "judge", "certifier"]
Isolation = Literal["episode", "group"]


class TestOutcome(msgspec.Struct, frozen=True):
    """One test's result: name is ``path::function``."""

    name: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    message: str = ""
    observed: tuple[str, ...] = ()
    """The values that a sealed test observed (vmhost/guest/testing/observing.py)."""


class OpResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation. `ok` is False for a missing file, a non-zero exit code, failed tests or a time limit;
    `error` then says so in one line that a model can use."""

    ok: bool = True
    error: str = ""
    code: Integer = 0
    stdout: str = ""
    stderr: str = ""
    data: bytes = b""
    files: dict[str, bytes] = {}
    tests: tuple[TestOutcome, ...] = ()
    digest: str = ""
    timed_out: bool = False
    truncated: bool = False
    wall_ms: Finite = 0.0
    job: Integer = 0
    running: bool = False
    changes: tuple[Change, ...] = ()
    originals: dict[str, bytes] = {}
    tampered: tuple[str, ...] = msgspec.field(default=(), name="touched")
    """Changes that `CheckIntegrity` found: paths of files, ``kernel``, names of settings."""
    ended: bool = False
    """The sandbox's own programs ended it; `error` says how, and every later call gets this answer. It is an outcome of
    the attempt, and no failure of the infrastructure."""


class SandboxLost(HeadraceError):
    """The sandbox has ended (machine, lease or epoch): a failure of the infrastructure, never of the policy."""


class SandboxRefused(SandboxLost):
    """A node cannot serve the request at all: its image, folder or limits are not possible there."""


class FilesRefused(SandboxRefused):
    """A new sandbox cannot hold the files of its request: too many or too large, or their paths contradict each
    other."""


class NoCapacity(HeadraceError):
    """No node has capacity for another sandbox now: wait and acquire again."""

    waited_s = 0.0
    """How long the caller has waited."""


class Sandbox(Protocol):
    """An isolated workspace. Calls may run concurrently; a repeated `call_id` gets the first answer."""

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. SandboxLost when the sandbox has ended."""


@message("acquire")
class Acquire(Message, frozen=True, kw_only=True):
    """Ask a node for a sandbox; idempotent by (run, lane, role, group, slot, attempt): a repeat gets the same sandbox
    under a new secret and epoch, and the old ones are refused from then on. A repeat with fewer `handovers` than the
    holder's is refused itself: it comes from before the request was handed on."""

    run: str
    lane: str
    role: Role
    """The caller's own: a node refuses any other. The judge and the certifier have a share of a node's machines."""
    group: str
    slot: Count
    attempt: Count
    isolation: Isolation
    template: str = "light"
    """A template, or an image of the node's store by name, reference or digest."""
    workdir: str = ""
    """The workspace's folder in an image, absolute; empty: the image's working directory."""
    seed: Seed = 0
    lease_s: Seconds = 120.0
    handovers: Count = 0
    hostname: str = ""
    """Host name inside; empty: the same in every sandbox."""
    network: tuple[str, ...] = ()
    """Destinations that it may reach through the host's proxy, as ``name:port`` with ``*`` in either; empty: none."""
    requires: tuple[str, ...] = ()
    """Capabilities that the backend must have besides those that the other fields imply (vmhost/backend.py)."""
    limits: SandboxLimits = SandboxLimits()
    """A sandbox with any of them has its machine for itself."""
    files: dict[str, bytes] = {}
    """The repository, pushed in the same frame that starts the clone. A task's tests are never in it."""
    entries: tuple[Change, ...] = ()
    """Its links, empty folders and executable files, the contents of which are in `files` too."""
    harness: str | UnsetType = UNSET
    """A harness of the node's configuration, to be mounted; unset: none."""


class GroupKey(NamedTuple):
    """The sandboxes that may share a machine: those of one group, in one run, lane and role."""

    run: str
    lane: str
    role: Role
    group: str


class SandboxKey(NamedTuple):
    """Identifies a sandbox: acquiring the same key again returns the same sandbox."""

    run: str
    lane: str
    role: Role
    group: str
    slot: Count
    attempt: Count

    @classmethod
    def of(cls, request: Acquire) -> "SandboxKey":
        """The key of a request."""
        return cls(request.run, request.lane, request.role, request.group, request.slot, request.attempt)

    @property
    def in_group(self) -> GroupKey:
        """The key of its group."""
        return GroupKey(self.run, self.lane, self.role, self.group)


ANY_RUN = "any"
"""Run id of an environment that serves every run of its broker; others serve their own alone."""


EVERYWHERE = "light"
"""The template that every node has."""


def acquire_method(run: str) -> str:
    """The method under which any node of a run may be asked for a sandbox; run: a token."""
    return f"acquire-{run}"


def holders(template: str) -> str:
    """The node token under which all nodes answer that hold a template or an image, by the name that a task gives."""
    return f"holds-{hashlib.sha256(template.encode()).hexdigest()[:24]}"


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """A harness's bundle in a sandbox."""

    folder: str
    runners: dict[str, tuple[str, ...]]
    """The words that start each of its programs."""


@message("acquired")
class Acquired(Message, frozen=True, kw_only=True):
    """The answer to Acquire: where to send calls, and the secret that each must carry."""

    node: str
    sandbox: str
    secret: str
    epoch: Count
    backend: str
    machine: str = ""
    """Content address of what the machine was made of: its template, or its image. Empty where the backend cannot tell.
    """
    digest: str | UnsetType = UNSET
    """Of the workspace when the files were pushed. Unset, and then not encoded, after the first call, in an image and
    for another role than rollout."""
    capabilities: tuple[str, ...] = ()
    """Names of what the backend can do (vmhost/backend.py)."""
    harness: Mounted | UnsetType = UNSET
    plugins: tuple[Plugin, ...] = ()
    """The backend, where it comes from outside of headrace, and the harness."""


@message("sandbox_call")
class SandboxCall(Message, frozen=True, kw_only=True):
    """One operation; `call_id` makes a repeat safe."""

    sandbox: str
    secret: str
    epoch: Count
    call_id: str
    op: Op


@message("sandbox_reply")
class SandboxReply(Message, frozen=True, kw_only=True):
    """The result, or why there is none: ``lost``, ``files_refused``, ``refused``, ``superseded``, ``no_room``,
    ``bad_request``."""

    result: OpResult | None = None
    failure: str = ""
    detail: str = ""


@message("renew")
class Renew(Message, frozen=True, kw_only=True):
    """Keep a sandbox for another lease."""

    sandbox: str
    secret: str
    epoch: Count
    lease_s: Seconds = 120.0


@message("release")
class Release(Message, frozen=True, kw_only=True):
    """Release a sandbox; its slot is never used again."""

    sandbox: str
    secret: str
    epoch: Count


@message("fork")
class Fork(Message, frozen=True, kw_only=True):
    """Sandboxes that continue from the present state of this one, one for each request of the same run, lane and role;
    this one continues too. It must have its machine for itself (isolation ``episode``)."""

    sandbox: str
    secret: str
    epoch: Count
    into: tuple[Acquire, ...]


@message("forked")
class Forked(Message, frozen=True, kw_only=True):
    """The answer to Fork, in the order of its requests."""

    held: tuple[Acquired, ...]


@message("release_group")
class ReleaseGroup(Message, frozen=True, kw_only=True):
    """No further slot of this group will be asked for: its VM may end once its sandboxes are released."""

    run: str
    lane: str
    role: Role
    group: str


@message("tool_log")
class ToolLog(Message, frozen=True, kw_only=True):
    """One line of the audit trail of a sandbox: which operation ran, never what it printed."""

    node: str
    sandbox: str
    run: str
    lane: str
    group: str
    slot: Count
    call_id: str
    op: str
    brief: str
    """At most 200 characters of its paths or words; empty for the judge's."""
    ok: bool
    wall_ms: Finite
