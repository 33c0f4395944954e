"""The image store: what images share is stored once, blobs never change, and a split image keeps its contents."""

import os
import stat
from pathlib import Path

import pytest

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, store
from tests.support import erofs
from tests.support.archives import Members, docker_save, file, folder, link

BIG = b"".join(os.urandom(1 << 16) for _ in range(20))
BASE: Members = [
    folder("bin"),
    file("bin/sh", BIG, mode=0o755),
    folder("lib"),
    file("lib/old", b"old"),
    file("lib/kept", b"kept" * 2000),
    folder("etc"),
    file("etc/conf", b"1"),
]
ONE: Members = [file("lib/.wh.old"), file("app", b"one"), link("lib/l", "/app")]
TWO: Members = [file("etc/conf", b"2"), file("app", b"two"), folder("etc/d"), file("etc/d/x" * 20, b"x" * 9000)]
MORE: Members = [file(".wh.lib"), folder("lib"), file("lib/new", b"new")]


def shown(image: imported.Image) -> dict[str, tuple[int, bytes]]:
    whole = erofs.merged([part.path for part in image.segments()])
    return {name: (entry.mode, b"" if stat.S_ISDIR(entry.mode) else entry.data) for name, entry in whole.items()}


def stored(cache: Path) -> int:
    blobs = {path.stat().st_ino: path.stat().st_blocks * 512 for path in cache.glob("layers-*/blob")}
    return sum(blobs.values())


def test_images_on_one_base_store_it_once_and_stay_what_they_were(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = imported.take(cache, docker_save(tmp_path / "1.tar", [BASE, ONE], ["one:1"]))
    before = shown(one)
    assert len(one.segments()) == 1 and before["app"][1] == b"one" and "lib/old" not in before
    two = imported.take(cache, docker_save(tmp_path / "2.tar", [BASE, TWO], ["two:1"]))
    assert len(two.segments()) == 2 and shown(two)["etc/conf"][1] == b"2" and shown(two)["lib/old"][1] == b"old"
    again = imported.find(cache, one.name)
    assert again is not None and len(again.segments()) == 2 and again.digest == one.digest
    assert again.segments()[0] == two.segments()[0] and shown(again) == before
    assert stored(cache) < 1.3 * len(BIG), "the first image's whole segment went when it was split"
    three = imported.take(cache, docker_save(tmp_path / "3.tar", [BASE, TWO, MORE], ["three:1"]))
    assert [len(part.below) for part in three.segments()] == [0, 1, 2]
    files = shown(three)
    assert files["lib/new"][1] == b"new" and "lib/kept" not in files and files["app"][1] == b"two"
    held = stored(cache)
    for number in range(4):
        layer: Members = [file("app", b"%d" % number)]
        imported.take(cache, docker_save(tmp_path / "n.tar", [BASE, layer], [f"n{number}:1"]))
    assert stored(cache) - held < len(BIG) // 4, "only the first image's own segment was written before it was shared"
    for part in three.segments():
        assert store.intact(part) and stat.S_IMODE(part.path.stat().st_mode) == 0o444
        assert part.path.stat().st_size == store.DRIVE_BYTES


def test_an_image_is_known_by_name_reference_and_digest(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    saved = docker_save(tmp_path / "1.tar", [BASE], ["ghcr.io/org/tool:1.2", "tool:latest"])
    image = imported.take(cache, saved)
    names = ("tool-1.2", "ghcr.io/org/tool:1.2", "tool", "docker.io/library/tool", image.digest)
    for name in (*names, f"sha256:{image.digest}"):
        record = imported.find(cache, name)
        assert record is not None and record.digest == image.digest, name
    assert imported.find(cache, "ghcr.io/org/tool") is None


def test_a_damaged_store_says_what_to_do(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    image = imported.take(cache, docker_save(tmp_path / "1.tar", [BASE]))
    (part,) = image.segments()
    part.path.chmod(0o644)
    with part.path.open("r+b") as blob:
        blob.seek(part.bytes // 2)
        blob.write(b"changed")
    assert not store.intact(part)
    part.path.unlink()
    with pytest.raises(VmhostError, match="import or pull it again"):
        image.segments()
    assert imported.take(cache, docker_save(tmp_path / "1.tar", [BASE])).segments() == [part]
