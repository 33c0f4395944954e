"""A commit is read as objects: forged trees are refused while they are listed, and no link or attribute is followed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.archives import commits
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, files_of, safe_path
from tests.support import forged

LIMITS = ArchiveLimits(100, 1 << 16)


def read(repository: Path, commit: str = "HEAD") -> dict[str, bytes]:
    return dict(files_of(commits.members(repository, commit, LIMITS, commits.environment()), skip_links=True))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forged.repository_at(tmp_path_factory.mktemp("commits") / "r")


def test_a_commit_is_read_as_its_objects_without_links_and_submodules(repository: Path) -> None:
    text, link = forged.blob(repository, b"a\n$Format:%H$\n"), forged.blob(repository, b"/etc/passwd")
    attributes = forged.blob(repository, b"* export-subst eol=crlf\na export-ignore\n")
    inner = forged.git(repository, "mktree", data=f"100755 blob {text}\tb\n".encode())
    entries = [("100644", b".gitattributes", attributes), ("100644", b"a", text), ("40000", b"d", inner)]
    entries += [("120000", b"l", link), ("160000", b"s", "0" * 39 + "1")]
    content = b"a\n$Format:%H$\n"
    commit = forged.commit_of(repository, *entries)
    assert read(repository, commit) == {
        ".gitattributes": b"* export-subst eol=crlf\na export-ignore\n",
        "a": content,
        "d/b": content,
    }


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_a_tree_of_ten_billion_entries_ends_at_the_limit(repository: Path, kind: str) -> None:
    blob, empty = forged.blob(repository, b"x"), forged.empty_tree(repository)
    commit = forged.tower(repository, *(("100644", blob) if kind == "files" else ("40000", empty)))
    with pytest.raises(ArchiveTooLarge, match="files"):
        read(repository, commit)


@pytest.mark.parametrize("name", [b"..", b"\xff", b"a" * 300, b"a" * 100_000, b"."])
def test_a_name_that_no_sandbox_takes_is_refused(repository: Path, name: bytes) -> None:
    commit = forged.commit_of(repository, ("100644", name, forged.blob(repository, b"x")))
    with pytest.raises(ArchiveRefused):
        read(repository, commit)


def test_too_many_bytes_and_missing_objects_are_refused(repository: Path) -> None:
    half = forged.blob(repository, bytes(1 << 15))
    assert len(read(repository, forged.commit_of(repository, ("100644", b"a", half), ("100644", b"b", half)))) == 2
    three = [("100644", b"%d" % n, half) for n in range(3)]
    with pytest.raises(ArchiveTooLarge, match="unpacks to more than"):
        read(repository, forged.commit_of(repository, *three))
    for id, commit in (("1" * 40, ""), (half, "no-such-commit")):
        made = forged.commit_of(repository, ("100644", b"a", id))
        with pytest.raises(ArchiveRefused, match=r"it has no commit|git cannot read"):
            read(repository, commit or made)


modes = st.sampled_from(["100644", "100755", "120000", "160000", "40000", "0", "777777", "10064"])
names = st.binary(min_size=1, max_size=8).map(lambda name: name.replace(b"\0", b"x")) | st.just(b"a/b")


def holds(repository: Path, entries: list[tuple[str, bytes]]) -> None:
    id = forged.blob(repository, b"x")
    commit = forged.commit_of(repository, *((mode, name, id) for mode, name in entries))
    try:
        assert all(safe_path(path) for path in read(repository, commit))
    except ArchiveRefused as error:
        assert str(error)


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(modes, names), max_size=4))
def test_any_tree_is_read_or_refused(repository: Path, entries: list[tuple[str, bytes]]) -> None:
    holds(repository, entries)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, database=None)
@given(st.lists(st.tuples(modes, names), max_size=4))
def test_very_many_trees_are_read_or_refused(repository: Path, entries: list[tuple[str, bytes]]) -> None:
    holds(repository, entries)


def test_a_missing_object_is_asked_of_no_program_that_the_repository_names(tmp_path: Path) -> None:
    repository = forged.repository_at(tmp_path / "r")
    ran = forged.armed(repository)
    with pytest.raises(ArchiveRefused, match="not allowed"):
        read(repository)
    assert not ran.exists(), ran.read_text()
