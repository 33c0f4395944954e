"""`headrace images`: store, list, verify, forget."""

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.vmhost.images import imported
from tests.support.archives import docker_save, file, folder


def test_an_image_is_stored_listed_verified_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    here = ["--set", f"environment.cache_dir={json.dumps(str(cache))}"]
    saved = docker_save(tmp_path / "a.tar", [[folder("bin"), file("bin/sh", b"#!")]], WorkingDir="/srv")
    assert main(["images", str(saved), "--name", "mine", "--memory-mb", "300", *here]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["workdir"], shown["memory_mb"], shown["tags"]) == ("mine", "/srv", 300, ["app:1"])
    assert main(["images", "--verify", *here]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    image = imported.find(cache, "mine")
    assert image is not None
    (part,) = image.segments()
    part.path.chmod(0o644)
    with part.path.open("r+b") as blob:
        blob.write(b"changed")
    assert main(["images", "--verify", *here]) == 1
    assert "was changed: run `headrace vm gc --forget mine`" in capsys.readouterr().err
    assert main(["vm", "gc", "--forget", "mine", *here]) == 0
    assert "layers of images" in capsys.readouterr().out
    assert imported.names(cache) == [] and not list(cache.glob("layers-*"))
    assert main(["images", "not an image:1", *here]) == 3
    assert "expected an image such as docker.io/org/app:1.2" in capsys.readouterr().err
