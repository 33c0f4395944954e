"""The guest image's files: commands of its build have time limits."""

from pathlib import Path

import pytest

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import packages


def test_a_download_that_does_not_end_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mmdebstrap"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    packages.download(tmp_path / "root.tar", ["busybox-static"])
    monkeypatch.setattr(packages, "DOWNLOAD_S", 1e-6)
    with pytest.raises(VmhostError, match=r"mmdebstrap did not end within 1e-06 s: check that the mirrors"):
        packages.download(tmp_path / "root.tar", ["busybox-static"])
