"""The judge makes allowed changes of an image and no others, for any claim of a sandbox."""

import random
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest

from headrace.judging.candidates import image_changes, repository, repository_entries
from headrace.messages.codec import encode
from headrace.messages.sandbox import Change, SandboxReply
from headrace.messages.tasks import HOST_FOLDER
from headrace.vmhost.guest.frames import Garbage
from headrace.vmhost.protocol import to_changes, to_frame
from tests.judging.test_rules import ORACLE, TASK, acted

IMAGE_TASK = msgspec.structs.replace(TASK, image="sha256:1", allowed=("app/**", "/etc/app/*"))


def judged(*changes: Change, files: dict[str, bytes]) -> tuple[str, ...]:
    """The paths that the judge changes for these claims."""
    claim = msgspec.structs.replace(acted("true"), changes=changes, diff=files)
    return tuple(change.path for change in image_changes(IMAGE_TASK, ORACLE, claim).changes)


def test_nothing_is_written_through_a_link() -> None:
    """The folder that the link names is outside the allowed paths; no walk of a real layer finds an entry below it."""
    link = Change("app/out", "link", 0o777, "/usr/lib/python3")
    through = [Change(path, "file", 0o644) for path in ("app/out/os.py", "app//out/./os.py", "app/out/deep/os.py")]
    beside = Change("app/outer.py", "file", 0o644)
    files = {change.path: b"" for change in (*through, beside)}
    assert judged(*through, link, beside, files=files) == ("app/out", "app/outer.py")


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_forged_changes_are_refused_or_stay_in_the_allowed_paths(count: int) -> None:
    draw = random.Random(2026)
    odd: list[Any] = [None, True, -1, 1 << 70, 1e308, [], {}, "\ud800", "x" * 5000, [["a"]]]
    names = ["a", "b", "..", ".", "", "\ud800", "\0", "app", "etc", HOST_FOLDER.rstrip("/"), "é\n", "n" * 300]
    ends = {"garbage": 0, "made": 0}

    def field(usual: Any) -> Any:
        return draw.choice(odd) if draw.random() < 0.02 else usual

    def path() -> str:
        start = draw.choice(["", "/", "app/", "app/", "app/", "/etc/app/"])
        return start + "/".join(draw.choice(names) for _ in range(draw.randrange(1, 4)))

    for _ in range(count):
        kinds = [draw.choice(["gone", "file", "folder", "link", "other"]) for _ in range(draw.randrange(5))]
        entries = [[field(path()), field(kind), field(0o7777), field(path())] for kind in kinds]
        bodies = [b"1"] * (kinds.count("file") + (draw.random() < 0.05))
        header: dict[str, Any] = {"entries": field(entries), "originals": field([]), "truncated": field(False)}
        try:
            reply = to_changes(header, bodies, "/repo", 1.0)
        except Garbage:
            ends["garbage"] += 1
            continue
        assert encode(SandboxReply(result=reply))[0]
        claim = msgspec.structs.replace(acted("true"), changes=reply.changes, diff=reply.files)
        made = image_changes(IMAGE_TASK, ORACLE, claim)
        _, contents = to_frame(made)
        assert len(contents) == sum(change.kind == "file" for change in made.changes)
        links = {PurePosixPath(change.path) for change in made.changes if change.kind == "link"}
        for change in made.changes:
            parts = PurePosixPath(change.path).parts
            assert ".." not in parts and (parts[0] == "app" or parts[:3] == ("/", "etc", "app")), change
            assert links.isdisjoint(PurePosixPath(change.path).parents), change
        ends["made"] += 1
    assert min(ends.values()) > count // 20


def test_a_link_or_a_folder_of_the_candidate_does_not_reach_the_set_up_of_hidden_tests() -> None:
    """Otherwise a link named conftest.py would be loaded where a file of that name is left out."""
    task = msgspec.structs.replace(TASK, allowed=("**",), files={"app/a.py": b"", "notes.txt": b""})
    claim = msgspec.structs.replace(
        acted("true"),
        changes=(
            Change("conftest.py", "link", 0o777, "notes.txt"),
            Change("app/conftest.py", "link", 0o777, "../notes.txt"),
            Change("sitecustomize", "folder", 0o755),
            Change("pytest.ini", "link", 0o777, "notes.txt"),
            Change("app/kept", "link", 0o777, "a.py"),
        ),
        diff={},
    )
    files = repository(task, ORACLE, claim.diff, claim.deleted)
    assert [entry.path for entry in repository_entries(task, ORACLE, claim, files)] == ["app/kept"]
