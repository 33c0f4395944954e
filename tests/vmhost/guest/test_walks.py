"""The removal of a sandbox's folder: the folder goes last, and a removal that is cut short can be repeated."""

import os
from pathlib import Path

import pytest

from headrace.vmhost.guest import walks


def tree(root: Path) -> None:
    """Folders in folders, a folder without rights, a link to a file outside."""
    for first in range(3):
        for second in range(3):
            (root / f"a{first}" / f"b{second}" / "c").mkdir(parents=True)
            (root / f"a{first}" / f"b{second}" / "c" / "file").write_text("x")
    (root / "a1" / "outside").symlink_to("/etc/hostname")
    (root / "a2").chmod(0o000)


def test_the_folder_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of a process sandbox waits until its folder is gone, and then kills what is left of the agent."""
    root = tmp_path / "sandbox"
    tree(root)
    gone: list[str] = []
    rmdir = os.rmdir

    def record(path: str) -> None:
        rmdir(path)
        gone.append(path)
        assert os.listdir(tmp_path) == (["sandbox"] if path != str(root) else []), "nothing lies outside of the folder"

    monkeypatch.setattr(os, "rmdir", record)
    walks.remove(str(root))
    assert len(gone) == 3 + 9 + 9 + 1
    assert gone[-1] == str(root)


@pytest.mark.parametrize("after", range(0, 22, 3))
def test_a_removal_that_was_cut_short_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    root = tmp_path / "sandbox"
    tree(root)
    rmdir = os.rmdir
    left = [after]

    def cut(path: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        rmdir(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rmdir", cut)
        walks.remove(str(root))
    assert os.listdir(tmp_path) == ["sandbox"]
    walks.remove(str(root))
    assert os.listdir(tmp_path) == []
