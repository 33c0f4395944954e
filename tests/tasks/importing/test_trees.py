"""Files of a commit are read from a checkout on this machine, within a limit."""

from pathlib import Path

import pytest

from headrace.archives import commits
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportRefused
from tests.support import forged, rows


def test_a_commit_is_read_unless_it_is_too_large_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows.repository(tmp_path)
    [folder] = [path for path in tmp_path.iterdir() if (path / ".git").exists()]
    files = trees.archive(folder, row["base_commit"]).files
    assert files and all(isinstance(content, bytes) for content in files.values())
    for wrong in ("0" * 40, "no-such-branch", "--output=x", "a b"):
        with pytest.raises(ImportRefused, match=r"has no commit|expected a commit"):
            trees.archive(folder, wrong)
    monkeypatch.setattr(trees, "LARGEST_TREE", sum(map(len, files.values())) - 1)
    with pytest.raises(ImportRefused, match="import the row with its image instead"):
        trees.archive(folder, row["base_commit"])


def test_a_checkout_with_ten_billion_folders_is_refused(tmp_path: Path) -> None:
    repository = forged.repository_at(tmp_path / "r")
    commit = forged.tower(repository, "40000", forged.empty_tree(repository))
    with pytest.raises(ImportRefused, match="files and folders; import the row with its image instead"):
        trees.archive(repository, commit)


def test_a_git_that_does_not_end_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "GIT_S", 1e-6)
    with pytest.raises(ImportRefused, match=r"^git apply did not end within 1e-06 s: leave this task out"):
        trees.apply(
            trees.Tree({"a": b"1\n"}, {}), "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n", "the patch"
        )


def test_files_that_look_like_a_repository_name_no_program_that_a_patch_runs(tmp_path: Path) -> None:
    ran, change = tmp_path / "ran", "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n"
    settings = f'[core]\nrepositoryFormatVersion = 0\n[filter "x"]\nclean = touch {ran}\n'
    git = {"HEAD": b"ref: refs/heads/x\n", "config": settings.encode(), "objects/a": b"", "refs/a": b""}
    files = {f".git/{name}": data for name, data in git.items()} | {".gitattributes": b"* filter=x\n", "a": b"1\n"}
    patch = "".join(f"rename from {path}\n" for path in files) + change
    assert trees.apply(trees.Tree(files, {}), patch, "the patch").changed == {"a": b"2\n"}
    assert not ran.exists()
