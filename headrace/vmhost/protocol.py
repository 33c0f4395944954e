"""Operations and results of `messages.sandbox` as frames for the slot agent.

The guest is not trusted: its answers are decoded into one strict struct, and an answer that does not fit it is
`Garbage`, which ends the sandbox.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from headrace.messages.sandbox import (
    ApplyChanges,
    Cancel,
    Change,
    CheckIntegrity,
    Exec,
    FeedJob,
    FollowJob,
    ListFiles,
    Op,
    OpResult,
    PullChanges,
    PullTar,
    PullTree,
    PushTar,
    ReadFile,
    ReplaceLines,
    RunTests,
    Search,
    StartEndpoint,
    StartJob,
    StopJob,
    TestOutcome,
    WriteFiles,
)
from headrace.vmhost.guest.frames import Garbage
from headrace.vmhost.guest.names import of_key, raw, shown

Frame = tuple[dict[str, Any], list[bytes]]


# The answer is forwarded as msgpack, which has no larger integer.
_Integer = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)]


class _Reply(msgspec.Struct):
    ok: bool = True
    error: str = ""
    code: _Integer = 0
    stdout: int = -1
    stderr: int = -1
    data: int = -1
    paths: list[str] = []
    entries: list[tuple[str, Literal["file", "folder", "link"], _Integer, str]] = []
    tests: list[tuple[str, Literal["passed", "failed", "error", "skipped"], str, list[str]]] = []
    digest: str = ""
    timed_out: bool = False
    truncated: bool = False
    job: _Integer = 0
    running: bool = False


def to_frame(op: Op) -> Frame:
    """Header and bodies of an operation."""
    match op:
        case Exec():
            header = {"op": "exec", "argv": op.argv, "cwd": op.cwd, "env": op.env}
            header |= {"user": op.user} if op.user else {}
            return header | {"timeout_s": op.timeout_s, "output_cap": op.output_cap}, [op.stdin]
        case ReadFile():
            return {"op": "read_file", "path": op.path, "limit": op.limit}, []
        case WriteFiles():
            header = {"op": "write_files", "paths": list(op.files), "delete": op.delete}
            return header | _forced(op.forced), list(op.files.values())
        case ReplaceLines():
            return {"op": "replace_lines", "path": op.path, "first": op.first, "last": op.last, "text": op.text}, []
        case ListFiles():
            return {"op": "list_files", "pattern": op.pattern, "limit": op.limit}, []
        case Search():
            header = {"op": "search", "pattern": op.pattern, "glob": op.glob}
            return header | {"context": op.context, "limit": op.limit}, []
        case RunTests():
            return {"op": "run_tests"} | msgspec.to_builtins(op.plan), []
        case PullTree():
            return {"op": "pull_tree", "patterns": op.patterns, "limit": op.limit}, []
        case Cancel():
            return {"op": "cancel", "call": op.call_id}, []
        case StartJob():
            fields = msgspec.structs.asdict(op) | {"op": "start_job"}
            del fields["stdin"]
            return fields, [op.stdin]
        case FollowJob():
            followed = {"op": "follow_job", "job": op.job, "wait_s": op.wait_s, "limit": op.limit}
            return followed | ({"raw": True} if op.raw else {}), []
        case FeedJob():
            return {"op": "feed_job", "job": op.job, "last": op.last}, [op.data]
        case StopJob():
            return {"op": "stop_job", "job": op.job, "signal": op.signal}, []
        case StartEndpoint():
            return {"op": "start_endpoint"}, []
        case PushTar():
            return {"op": "push_tar", "path": op.path} | _forced(op.forced), [op.data]
        case PullTar():
            return {"op": "pull_tar", "path": op.path, "limit": op.limit}, []
        case ApplyChanges():
            entries = [[change.path, change.kind, change.mode, change.target] for change in op.changes]
            files = [op.files[change.path] for change in op.changes if change.kind == "file"]
            return {"op": "apply_changes", "entries": entries} | _forced(op.forced), files
        case CheckIntegrity() | PullChanges():
            raise ValueError("the host answers this operation; the slot is not asked")


def _forced(forced: bool) -> dict[str, Any]:
    return {"forced": True} if forced else {}


def open_frame(files: dict[str, bytes], seed: int, workdir: str = "", digest: bool = False) -> Frame:
    """The first frame of a slot: its repository, the seed of its test processes, and the time that it waits for.
    workdir: the workspace's folder in an image, where it is not the image's own. digest: answer with the tree's."""
    header = {"op": "open", "seed": seed, "time": time.time_ns(), "paths": list(map(of_key, files))}
    header |= {"digest": True} if digest else {}
    return header | ({"op": "open_at", "workdir": workdir} if workdir else {}), list(files.values())


def entries_frame(entries: Sequence[Change], files: Mapping[str, bytes]) -> Frame:
    """The frame of a repository's links, folders and modes, after `open_frame`. Paths are keys on the host."""
    changes = tuple(msgspec.structs.replace(entry, path=of_key(entry.path)) for entry in entries)
    return to_frame(ApplyChanges(changes=changes, files={of_key(path): data for path, data in files.items()}))


def to_result(header: dict[str, Any], bodies: list[bytes], wall_ms: float) -> OpResult:
    """Decode a guest's answer. Garbage when it is not a result."""
    try:
        reply = msgspec.convert(header, _Reply)
    except (msgspec.ValidationError, UnicodeError) as error:  # msgspec cannot quote a lone surrogate in its message
        raise Garbage(f"an unreadable answer: {str(error)!a}") from None
    if len(reply.paths) > len(bodies):
        raise Garbage("an answer with more paths than contents")

    def body(index: int) -> bytes:
        return bodies[index] if 0 <= index < len(bodies) else b""

    return OpResult(
        ok=reply.ok,
        error=_text(reply.error),
        code=reply.code,
        stdout=body(reply.stdout).decode("utf-8", "replace"),
        stderr=body(reply.stderr).decode("utf-8", "replace"),
        data=body(reply.data),
        files=dict(zip(map(_text, reply.paths), bodies, strict=False)),
        tests=tuple(
            TestOutcome(_text(name), outcome, _text(message), tuple(map(_text, observed)))
            for name, outcome, message, observed in reply.tests
        ),
        changes=tuple(_change(*entry) for entry in reply.entries),
        digest=_text(reply.digest),
        timed_out=reply.timed_out,
        truncated=reply.truncated,
        wall_ms=wall_ms,
        job=reply.job,
        running=reply.running,
    )


def _change(path: str, kind: Literal["file", "folder", "link"], mode: int, target: str) -> Change:
    if _text(target) != target:  # no message can carry it
        return Change(_text(path), "other")
    return Change(_text(path), kind, mode & 0o7777, target)


def _text(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class _Changes(msgspec.Struct):
    ok: bool = True
    error: str = ""
    entries: list[tuple[str, Literal["gone", "file", "folder", "link", "other"], _Integer, str]] = []
    originals: list[str] = []
    truncated: bool = False


def to_changes(header: dict[str, Any], bodies: list[bytes], workdir: str, wall_ms: float) -> OpResult:
    """Decode the first process's answer about changes. workdir: paths in it become relative. Garbage."""
    try:
        reply = msgspec.convert(header, _Changes)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise Garbage(f"an unreadable answer: {str(error)!a}") from None
    contents = [entry for entry in reply.entries if entry[1] == "file"]
    if len(bodies) != len(contents) + len(reply.originals):
        raise Garbage("an answer whose contents do not fit its paths")

    def relative(path: str) -> str:
        return shown(raw(path).removeprefix(f"{workdir}/")) if workdir != "/" else path

    changes, files = [], {}
    pieces = iter(bodies)
    for path, kind, mode, target in reply.entries:
        data = next(pieces) if kind == "file" else b""
        name = relative(_text(path))
        if _text(path) != path or _text(target) != target:  # no text that a message can carry
            changes.append(Change(name, "other"))
            continue
        changes.append(Change(name, kind, mode & 0o7777, target))
        if kind == "file":
            files[name] = data
    originals = {relative(_text(path)): data for path, data in zip(reply.originals, pieces, strict=True)}
    return OpResult(
        ok=reply.ok,
        error=_text(reply.error),
        changes=tuple(changes),
        files=files,
        originals=originals,
        truncated=reply.truncated,
        wall_ms=wall_ms,
    )


def deadline_s(op: Op) -> float:
    """Seconds until the host gives up on an answer: the operation's own limit, and slack."""
    match op:
        case Exec():
            return op.timeout_s + SLACK_S
        case RunTests():
            return op.plan.timeout_s + SLACK_S
        case FollowJob():
            return op.wait_s + SLACK_S
    return SLACK_S


SLACK_S = 30.0
"""A guest under emulation on a busy host may be late by seconds. The end of a machine is noticed by its channel."""
