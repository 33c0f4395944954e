"""Names from outside stay below their folder."""

from pathlib import Path

import pytest

from headrace.inner_paths import inner, is_inner


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
