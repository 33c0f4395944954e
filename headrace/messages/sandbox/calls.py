"""The sandbox contract: operations, results, and the calls that carry them to an environment actor.

One operation set for production and training. The same structs travel host to guest (framed, see vmhost/channel) and
actor to actor; `Sandbox` is the surface that harness, tasks and judge program against, whoever stands behind it.
"""

from typing import Literal, Protocol

import msgspec

from headrace.messages.base import Message, message
from headrace.messages.tasks import TestPlan

Role = Literal["rollout", "judge"]
Isolation = Literal["episode", "group"]


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag="exec"):
    """Run argv in the workspace as the tools' user. Output beyond `output_cap` bytes per stream is cut and marked."""

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    stdin: bytes = b""
    timeout_s: float = 30.0
    output_cap: int = 65536
    user: str = ""
    """Another user of an imported image, by name or number; the built-in images have one."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End the Exec (or test command) that runs under a call id, with all it started; its own answer says so."""

    call_id: str


class StartJob(msgspec.Struct, frozen=True, kw_only=True, tag="start_job"):
    """Run argv beside the calls that follow; `OpResult.job` is its number. What it writes waits for `FollowJob`, up to
    `output_cap` bytes a stream; then it waits itself."""

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    stdin: bytes = b""
    open_input: bool = False
    """Whether FeedJob may send more."""
    terminal: bool = False
    """In a terminal of its own, 80 by 24: one stream, and input stays open."""
    timeout_s: float = 3600.0
    output_cap: int = 65536
    user: str = ""


class FollowJob(msgspec.Struct, frozen=True, kw_only=True, tag="follow_job"):
    """What a job wrote since the last call, at most `limit` bytes a stream, waiting `wait_s` for the first of it.

    `OpResult.running` is False once the job has ended and all of its output was given out; then `code` is its own.
    """

    job: int
    wait_s: float = 10.0
    limit: int = 65536


class FeedJob(msgspec.Struct, frozen=True, kw_only=True, tag="feed_job"):
    """Input for a job; `last` closes it (in a terminal: end of file)."""

    job: int
    data: bytes = b""
    last: bool = False


class StopJob(msgspec.Struct, frozen=True, kw_only=True, tag="stop_job"):
    """A signal for a job and all of its session."""

    job: int
    signal: int = 9


class PushTar(msgspec.Struct, frozen=True, kw_only=True, tag="push_tar"):
    """Unpack a tar archive (plain, gzip, bzip2 or xz) into a folder: modes, times and links as they are in it, owners
    the tools' user."""

    data: bytes
    path: str = "."


class PullTar(msgspec.Struct, frozen=True, kw_only=True, tag="pull_tar"):
    """A folder (or file) as a tar archive in `OpResult.data`. What a guest packs is not to be trusted when unpacked."""

    path: str = "."
    limit: int = 64 << 20


class ReadFile(msgspec.Struct, frozen=True, kw_only=True, tag="read_file"):
    """Content of one file (in `OpResult.data`), at most `limit` bytes."""

    path: str
    limit: int = 1 << 20


class WriteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="write_files"):
    """Create or replace files, making folders as needed; `delete` removes paths."""

    files: dict[str, bytes]
    delete: tuple[str, ...] = ()


class ReplaceLines(msgspec.Struct, frozen=True, kw_only=True, tag="replace_lines"):
    """Replace lines first..last (1-based, inclusive) of a file by `text`; last = first - 1 inserts before first."""

    path: str
    first: int
    last: int
    text: str


class ListFiles(msgspec.Struct, frozen=True, kw_only=True, tag="list_files"):
    """Paths under the workspace that match a glob, sorted, in `OpResult.stdout`, one a line."""

    pattern: str = "**"
    limit: int = 1000


class Search(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """Lines that match a regular expression, as ``path:line:text``; `context` adds that many lines after each hit."""

    pattern: str
    glob: str = "**"
    context: int = 0
    limit: int = 50


class RunTests(msgspec.Struct, frozen=True, kw_only=True, tag="run_tests"):
    """Run tests by the prepared worker; results in `OpResult.tests`."""

    plan: TestPlan


class PullTree(msgspec.Struct, frozen=True, kw_only=True, tag="pull_tree"):
    """All files that match any of the globs, with a digest of the whole workspace, in `OpResult.files`/`digest`."""

    patterns: tuple[str, ...] = ("**",)
    limit: int = 8 << 20


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Look whether the sandbox's machine was touched where nothing honest writes; what was is in `OpResult.touched`.

    The host looks from outside, at files of the root and the kernel's code; the guest takes no part. `thorough` asks
    the machine's first process as well: modules, mounts, settings, stray processes. Not ok where it can't be told.
    """

    thorough: bool = False


Op = (
    Exec
    | ReadFile
    | WriteFiles
    | ReplaceLines
    | ListFiles
    | Search
    | RunTests
    | PullTree
    | Cancel
    | StartJob
    | FollowJob
    | FeedJob
    | StopJob
    | PushTar
    | PullTar
    | Inspect
)


class TestOutcome(msgspec.Struct, frozen=True):
    """One test's result: name is ``path::function``."""

    name: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    message: str = ""
    observed: tuple[str, ...] = ()
    """What a sealed test saw (vmhost/guest/observing.py)."""


class OpResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation gave. `ok` is False for an outcome the caller must hear about (missing file, exit code,
    failed tests, time limit); `error` then says it in one line that a model can use."""

    ok: bool = True
    error: str = ""
    code: int = 0
    stdout: str = ""
    stderr: str = ""
    data: bytes = b""
    files: dict[str, bytes] = {}
    tests: tuple[TestOutcome, ...] = ()
    digest: str = ""
    timed_out: bool = False
    truncated: bool = False
    wall_ms: float = 0.0
    job: int = 0
    running: bool = False
    touched: tuple[str, ...] = ()
    """What `Inspect` found: paths of files, ``kernel``, names of settings."""


class SandboxLost(Exception):
    """The sandbox is gone (VM died, lease lapsed, epoch passed): infrastructure, never the policy's failure."""


class NoRoom(Exception):
    """No node has room for another sandbox now: wait and ask again."""


class Sandbox(Protocol):
    """A place to act in. Calls may run concurrently; a repeated `call_id` is answered from the record."""

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. SandboxLost when the sandbox is gone."""


@message("acquire")
class Acquire(Message, frozen=True, kw_only=True):
    """Ask a node for a sandbox; idempotent by (run, lane, role, group, slot, attempt): a repeat gets the same sandbox
    under a new secret and epoch, and the old ones are refused from then on. A repeat with fewer `handovers` than the
    holder's is refused itself: it comes from before the request was handed on."""

    run: str
    lane: str
    role: Role
    group: str
    slot: int
    attempt: int
    isolation: Isolation
    template: str = "light"
    seed: int = 0
    lease_s: float = 120.0
    handovers: int = 0
    hostname: str = ""
    """What its machine calls itself; empty: as all others do."""
    network: tuple[str, ...] = ()
    """What it may reach, as ``name:port`` with ``*`` in either, through a proxy of the host's; empty: nothing."""
    files: dict[str, bytes] = {}
    """The repository, pushed in the same frame that starts the clone. A task's tests are never in it."""


ANY_RUN = "any"
"""Run id of an environment that serves every run of its broker; others serve their own alone."""


def acquire_method(run: str) -> str:
    """The method under which any node of a run may be asked for a sandbox; run: a token."""
    return f"acquire-{run}"


@message("acquired")
class Acquired(Message, frozen=True, kw_only=True):
    """The answer to Acquire: where to send calls, and the secret that each must carry."""

    node: str
    sandbox: str
    secret: str
    epoch: int
    backend: str


@message("sandbox_call")
class SandboxCall(Message, frozen=True, kw_only=True):
    """One operation; `call_id` makes a repeat safe."""

    sandbox: str
    secret: str
    epoch: int
    call_id: str
    op: Op


@message("sandbox_reply")
class SandboxReply(Message, frozen=True, kw_only=True):
    """The result, or why there is none: ``lost``, ``refused``, ``superseded``, ``no_room``, ``bad_request``."""

    result: OpResult | None = None
    failure: str = ""
    detail: str = ""


@message("renew")
class Renew(Message, frozen=True, kw_only=True):
    """Keep a sandbox for another lease."""

    sandbox: str
    secret: str
    epoch: int
    lease_s: float = 120.0


@message("release")
class Release(Message, frozen=True, kw_only=True):
    """Give a sandbox back; its slot is never used again."""

    sandbox: str
    secret: str
    epoch: int


@message("fork")
class Fork(Message, frozen=True, kw_only=True):
    """Sandboxes that go on from where this one is, one for each request of the same run, lane and role; this one goes
    on too. It must have its machine for itself (isolation ``episode``)."""

    sandbox: str
    secret: str
    epoch: int
    into: tuple[Acquire, ...]


@message("forked")
class Forked(Message, frozen=True, kw_only=True):
    """The answer to Fork, in the order of its requests."""

    held: tuple[Acquired, ...]


@message("checkpoint")
class Checkpoint(Message, frozen=True, kw_only=True):
    """The sandbox as bytes: what it changed, for nodes with the very same template file; or with `whole` all of it, for
    every node that made its template of the same parts."""

    sandbox: str
    secret: str
    epoch: int
    whole: bool = False


@message("checkpointed")
class Checkpointed(Message, frozen=True, kw_only=True):
    """The answer to Checkpoint."""

    data: bytes


@message("restore")
class Restore(Message, frozen=True, kw_only=True):
    """A sandbox for `request` that goes on from a checkpoint; answered like Acquire."""

    request: Acquire
    data: bytes


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
    slot: int
    call_id: str
    op: str
    brief: str
    ok: bool
    wall_ms: float
