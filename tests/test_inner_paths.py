"""Names from outside stay below their folder."""

import os
from pathlib import Path

import pytest

from headrace.inner_paths import inner, is_inner, own_file


@pytest.mark.parametrize("name", ["a", "a/b.task", "generated.v2/é", "..a", "a..", "...", "x" * 255])
def test_a_relative_name_is_joined(name: str) -> None:
    assert inner(Path("/root"), name) == Path("/root") / name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../a", "a/..", "a/../b", "a/./b", "/a", "//a", "a//b", "a/"),
        *("a\\b", "a\0b", "a\nb", "\ud800", "a\x7f", "x" * 256, "a/" * 2048 + "aa"),
    ],
)
def test_another_name_is_refused(name: str) -> None:
    assert not is_inner(name)
    with pytest.raises(ValueError, match="expected a relative path"):
        inner(Path("/root"), name)


def test_a_file_that_a_message_names_lies_below_its_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", tmp_path / "secret.safetensors"
    (root / "r" / "snapshots").mkdir(parents=True)
    outside.write_bytes(b"x")
    file = root / "r" / "snapshots" / "3.safetensors"
    file.write_bytes(b"x")
    (root / "link.safetensors").symlink_to(outside)
    (root / "r" / "here.safetensors").symlink_to(file)
    (root / "loop.safetensors").symlink_to(root / "loop.safetensors")
    (root / "key.nk").write_bytes(b"x")
    (root / "named.safetensors").symlink_to(root / "key.nk")
    os.mkfifo(root / "pipe.safetensors")
    (root / "folder.safetensors").mkdir()
    for path in (file, root / "r" / ".." / "r" / "snapshots" / file.name, root / "r" / "here.safetensors"):
        assert own_file(root, str(path), ".safetensors") == file.resolve()
    refused: tuple[Path | str, ...] = (
        *(outside, "/dev/zero", "/proc/self/environ", root / "r" / ".." / ".." / outside.name, "", "gone.safetensors"),
        *(tmp_path / "gone.safetensors", root / "link.safetensors", root / "loop.safetensors", root / "key.nk"),
        *(root / "named.safetensors", root / "pipe.safetensors", root / "folder.safetensors", f"{file}\0", "\ud800"),
    )
    for named in refused:
        with pytest.raises(ValueError, match="expected a file"):
            own_file(root, str(named), ".safetensors")
    with pytest.raises(FileNotFoundError):
        own_file(root, str(root / "gone.safetensors"), ".safetensors")
