"""Images of other stores, copied by skopeo: a real one from a layout, and the reasons why one is refused."""

import os
import shutil
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, skopeo
from tests.support.archives import Layout, file, folder

needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")


@needs_skopeo
def test_an_image_of_another_store_is_copied_and_imported(tmp_path: Path) -> None:
    made = Layout()
    made.image([[folder("bin"), file("bin/sh", b"shell", mode=0o755)], [file("app", b"1")]], "1", "gzip")
    for name, data in made.all().items():
        (tmp_path / "layout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "layout" / name).write_bytes(data)
    (tmp_path / "cache" / "copy-dead").mkdir(parents=True)
    image = skopeo.take(tmp_path / "cache", f"oci:{tmp_path / 'layout'}:1", imported.Request(name="app"))
    assert (image.name, image.entries) == ("app", 3)
    assert imported.find(tmp_path / "cache", "app") == image
    assert not [*(tmp_path / "cache").glob("copy-*")], "the archive, or one of a dead process, is left"


@needs_skopeo
def test_without_the_store_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--set", f"environment.cache_dir={tmp_path / 'cache'}"]
    if Path("/var/run/docker.sock").exists():
        pytest.skip("a docker daemon runs here")
    assert main(["images", "docker-daemon:app:1", *where]) == 3
    said = capsys.readouterr().err
    assert "docker-daemon:app:1 can't be imported: " in said and len(said.splitlines()) == 1, said


def test_a_machine_without_skopeo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VmhostError, match="apt-get install skopeo"):
        skopeo.take(tmp_path, "docker-daemon:app:1", imported.Request())
    assert os.listdir(tmp_path) == []
