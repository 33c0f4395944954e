"""The operations of a sandbox: commands, jobs, files, trees, tests, integrity. `Op` is any of them.

One set for production and training. The same structs travel from actor to actor and, as frames, from host to guest
(vmhost/protocol.py).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.messages.base import Count, Integer, Seconds
from headrace.messages.tasks import Change, TestPlan


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag="exec"):
    """Run argv in the workspace as the tools' user. Output beyond `output_cap` bytes per stream is cut and marked."""

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    stdin: bytes = b""
    timeout_s: Seconds = 30.0
    output_cap: Count = 65536
    user: str = ""
    """Another user of an imported image, by name or number; the built-in images have one."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End the Exec (or test command) that runs under a call id, with all processes that it started; the answer of the
    ended call says so."""

    call_id: str


class StartJob(msgspec.Struct, frozen=True, kw_only=True, tag="start_job"):
    """Start argv as a job that runs beside later calls; `OpResult.job` is its number. Its output is kept for
    `FollowJob`, up to `output_cap` bytes per stream; a job that has written as much is blocked until some is read."""

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    stdin: bytes = b""
    open_input: bool = False
    """Whether FeedJob may send more."""
    terminal: bool = False
    """In a terminal of its own, 80 by 24: one stream, and input stays open."""
    timeout_s: Seconds = 3600.0
    output_cap: Count = 65536
    user: str = ""


class FollowJob(msgspec.Struct, frozen=True, kw_only=True, tag="follow_job"):
    """Read a job's output since the last call, at most `limit` bytes per stream; waits up to `wait_s` seconds for some.

    `OpResult.running` is False once the job has ended and all of its output was read; `code` is then its exit code.
    """

    job: Integer
    wait_s: Seconds = 10.0
    limit: Count = 65536
    raw: bool = False
    """Standard output in `OpResult.data`, as bytes."""


class FeedJob(msgspec.Struct, frozen=True, kw_only=True, tag="feed_job"):
    """Input for a job; `last` closes it (in a terminal: end of file)."""

    job: Integer
    data: bytes = b""
    last: bool = False
    raw: bool = False
    """Of an endpoint's job: records of connections, which the tool log leaves out."""


class StopJob(msgspec.Struct, frozen=True, kw_only=True, tag="stop_job"):
    """A signal for a job and all of its session."""

    job: Integer
    signal: Annotated[int, Meta(ge=1, le=64)] = 9


class StartEndpoint(msgspec.Struct, frozen=True, kw_only=True, tag="start_endpoint"):
    """Listen on the sandbox's loopback, as a job: connections become records of its output and input
    (vmhost/guest/tunnel.py). `OpResult.job` is its number, `OpResult.stdout` its address and the folder that
    was made as a home outside of the workspace, one a line."""


class PushTar(msgspec.Struct, frozen=True, kw_only=True, tag="push_tar"):
    """Unpack a tar archive (plain, gzip, bzip2 or xz) into a folder: modes, times and links as they are in it, owners
    the tools' user."""

    data: bytes
    path: str = "."
    forced: bool = False
    """In an image: written also where the image's user may not write; new entries belong to that user."""


class PullTar(msgspec.Struct, frozen=True, kw_only=True, tag="pull_tar"):
    """Read a folder or file as a tar archive, in `OpResult.data`. A guest made the archive: unpack it with care."""

    path: str = "."
    limit: Count = 64 << 20


class ReadFile(msgspec.Struct, frozen=True, kw_only=True, tag="read_file"):
    """Content of one file (in `OpResult.data`), at most `limit` bytes."""

    path: str
    limit: Count = 1 << 20


class WriteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="write_files"):
    """Create or replace files, making folders as needed; `delete` removes paths."""

    files: dict[str, bytes]
    delete: tuple[str, ...] = ()
    forced: bool = False
    """In an image: written also where the image's user may not write; new entries belong to that user."""


class ReplaceLines(msgspec.Struct, frozen=True, kw_only=True, tag="replace_lines"):
    """Replace lines first..last (1-based, inclusive) of a file by `text`; last = first - 1 inserts before first."""

    path: str
    first: Count
    last: Count
    text: str


class ListFiles(msgspec.Struct, frozen=True, kw_only=True, tag="list_files"):
    """Paths under the workspace that match a glob, sorted, in `OpResult.stdout`, one a line."""

    pattern: str = "**"
    limit: Count = 1000


class Search(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """Lines that match a regular expression, one a line, as ``path NUL line:text``; `context` adds that many lines
    before and after each hit, as ``path NUL line-text``. vmhost/guest/lines.py defines a line."""

    pattern: str
    glob: str = "**"
    context: Count = 0
    limit: Count = 50


class RunTests(msgspec.Struct, frozen=True, kw_only=True, tag="run_tests"):
    """Run tests by the prepared worker; results in `OpResult.tests`."""

    plan: TestPlan


class PullTree(msgspec.Struct, frozen=True, kw_only=True, tag="pull_tree"):
    """All files that match any of the globs, with a digest of the whole workspace, in `OpResult.files`/`digest`;
    `OpResult.changes` has what the contents do not say: links, empty folders, and files that may be executed."""

    patterns: tuple[str, ...] = ("**",)
    limit: Count = 8 << 20


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of an attempt when it ended a step, in the fields of a Trajectory, which holds those at its end."""

    diff: dict[str, bytes]
    deleted: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    originals: dict[str, bytes] = {}
    touched: tuple[str, ...] = ()


class PullChanges(msgspec.Struct, frozen=True, kw_only=True, tag="pull_changes"):
    """Read the changes of a sandbox in its image, from the writable layer of its root: `OpResult.changes` in the order
    in which they are made again, contents of changed files in `OpResult.files`, and what they replaced in
    `OpResult.originals`. Truncated, and empty, when the contents have more than `limit` bytes.

    Git takes no part: commits and a removed ``.git`` change nothing here. Left out are ``.git``, caches of test runs,
    and temporary files.
    """

    limit: Count = 32 << 20
    originals: Count = 256 << 10
    """Largest original that is returned, in bytes."""


class ApplyChanges(msgspec.Struct, frozen=True, kw_only=True, tag="apply_changes"):
    """Make changes again in a fresh sandbox of the same image. files: contents by path."""

    changes: tuple[Change, ...]
    files: dict[str, bytes]
    forced: bool = False
    """In an image: written also where the image's user may not write; new entries belong to that user."""


class CheckIntegrity(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Check whether the sandbox's machine was changed where no legitimate work writes; `OpResult.tampered` lists it.

    The host reads the machine's memory: files of the root and the kernel's code; the guest takes no part. `thorough`
    also asks the machine's first process for modules, mounts, settings and stray processes. Not ok where the backend
    cannot tell.
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
    | StartEndpoint
    | PushTar
    | PullTar
    | CheckIntegrity
    | PullChanges
    | ApplyChanges
)
