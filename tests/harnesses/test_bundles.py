"""Bundles are named by their content, and nobody writes to them."""

from pathlib import Path

import pytest

from headrace.config import Program
from headrace.harnesses import bundles


def program(folder: Path, text: str) -> Program:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "agent").write_text(text)
    (folder / "bin" / "agent").chmod(0o755)
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to("bin/agent")
    return Program(install=f"folder:{folder}", command=("agent", "{prompt}"))


def test_a_bundle_is_named_by_its_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = bundles.make(cache, program(tmp_path / "a", "#!/bin/sh\n"))
    same = bundles.make(cache, program(tmp_path / "b", "#!/bin/sh\n"))
    changed = bundles.make(cache, program(tmp_path / "a", "#!/bin/sh\ntrue\n"))
    assert one.digest == same.digest != changed.digest
    assert bundles.find(cache, Program(install=f"folder:{tmp_path / 'a'}", command=("agent",))) == changed
    assert changed.mounted("/opt/x") == {"agent": ("/opt/x/bin/agent",)}
    assert {file.stat().st_mode & 0o222 for file in changed.folder.rglob("*") if file.is_file()} == {0}


def test_a_bundle_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(bundles.BundleError, match="nowhere"):
        bundles.make(tmp_path / "cache", Program(install=f"folder:{tmp_path}/nowhere", command=("agent",)))
    assert not list((tmp_path / "cache" / bundles.FOLDER).iterdir())
