"""Container images become roots: layers, whiteouts, links, owners; and what is damaged is refused in one sentence."""

import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from tests.support import erofs
from tests.support.archives import Layout, Members, docker_save, file, folder, layer, link, member

BASE: Members = [
    folder("bin"),
    file("bin/sh", b"#!", mode=0o4755),
    folder("etc"),
    file("etc/passwd", b"root:x:0:0::/root:/bin/sh\ndev:x:1000:100:Dev:/home/dev:/bin/sh\n"),
    file("etc/group", b"root:x:0:\nusers:x:100:\ndocker:x:42:dev,other\n"),
    folder("home/dev/", mode=0o700, uid=1000, gid=100),
    file("home/dev/note", b"kept", mode=0o640, uid=1000, gid=100, mtime=1_600_000_000),
    link("usr/lib/escape", "../../../../etc/passwd"),
    link("usr/lib/absolute", "/etc/passwd"),
    link("hard", "home/dev/note", tarfile.LNKTYPE),
    folder("opt/old"),
    file("opt/old/a", b"a"),
    file("opt/old/b", b"b"),
    file("gone", b"x"),
]
OVER: Members = [
    file(".wh.gone"),
    file("opt/old/new", b"new"),
    file("opt/old/.wh..wh..opq"),
    file("bin/tool", b"tool"),
    file("usr/lib/escape.d", b"beside"),
]


def contents(image: imported.Image) -> dict[str, erofs.Found]:
    """The image's files, under ``image/``."""
    whole = erofs.merged([part.path for part in image.segments()])
    return {f"image/{name}" if name else "image": entry for name, entry in whole.items()}


def test_layers_become_one_root(tmp_path: Path) -> None:
    saved = docker_save(tmp_path / "a.tar", [BASE, OVER], User="dev", WorkingDir="/srv/app", Env=["A=1", "B=x=y"])
    image = imported.take(tmp_path / "cache", saved)
    assert (image.name, image.uid, image.gid, image.groups, image.workdir) == ("app-1", 1000, 100, (42,), "/srv/app")
    assert image.env == {"PATH": imported.PATH, "HOME": "/home/dev", "A": "1", "B": "x=y"}
    root = contents(image)
    assert {"image/bin/sh", "image/bin/tool", "image/opt/old/new", "image/opt/old"} <= root.keys()
    assert not {"image/gone", "image/opt/old/a", "image/opt/old/b"} & root.keys()
    assert not any(".wh." in name for name in root)
    assert root["image/bin/sh"][0] == stat.S_IFREG | 0o4755
    assert root["image/home/dev"][:3] == (stat.S_IFDIR | 0o700, 1000, 100)
    note, hard = root["image/home/dev/note"], root["image/hard"]
    assert (note[:4], hard[:4]) == ((stat.S_IFREG | 0o640, 1000, 100, 2),) * 2
    assert note[4] == hard[4] and note[5] == hard[5] == b"kept" and note.mtime == 1_600_000_000
    assert root["image/usr/lib/escape"][5] == b"../../../../etc/passwd"
    assert root["image/usr/lib"][0] == stat.S_IFDIR | 0o755
    names = list(root)
    assert all(names.index(os.path.dirname(name)) < names.index(name) for name in names if name != "image")


@pytest.mark.parametrize("how", ["", "gzip", "zstd"])
@pytest.mark.parametrize("outside", ["", "gzip", "folder"])
def test_equal_images_are_equal_whatever_they_came_as(tmp_path: Path, how: str, outside: str) -> None:
    plain = imported.take(tmp_path / "cache", docker_save(tmp_path / "a.tar", [BASE, OVER], User="dev"), "one")
    layout = Layout()
    layout.image([BASE, OVER], "other", "", arch="arm64", User="dev")
    layout.image([BASE, OVER], "v1", how, User="dev")
    layout.nest()
    if outside == "folder":
        path = layout.folder(tmp_path / "layout")
    else:
        path = layout.tar(tmp_path / "b.tar", outside)
    image = imported.take(tmp_path / "cache", path, "two")
    assert image.segments() == plain.segments(), "equal layers are stored once"
    assert imported.names(tmp_path / "cache") == ["one", "two"]


def test_a_link_on_the_way_is_followed_inside_the_root_alone(tmp_path: Path) -> None:
    below: Members = [
        folder("bin"),
        folder("data"),
        link("out", "/"),
        link("up", "../../../data"),
        link("loop", "loop"),
    ]
    above: Members = [file("out/etc/x", b"x"), file("up/y", b"y"), file("up/.wh.z")]
    root = contents(imported.take(tmp_path / "cache", docker_save(tmp_path / "a.tar", [below, above])))
    assert root["image/etc/x"][5] == b"x" and root["image/data/y"][5] == b"y"
    assert root["image/out"][0] & stat.S_IFMT(0o170000) == stat.S_IFLNK
    assert not (tmp_path / "data").exists() and not Path("/data/y").exists()


def test_whiteouts_hide_lower_layers_whatever_their_order(tmp_path: Path) -> None:
    first: Members = [folder("bin"), folder("d"), file("d/old"), file("f", b"1")]
    second: Members = [folder("d"), file("d/mine"), file(".wh.d"), file("f", b"2"), file(".wh.f"), file(".wh.never")]
    root = contents(imported.take(tmp_path / "cache", docker_save(tmp_path / "a.tar", [first, second])))
    assert "image/d/mine" in root and "image/d/old" not in root and root["image/f"][5] == b"2"


def test_a_folder_gives_way_to_a_file_and_back(tmp_path: Path) -> None:
    layers: list[Members] = [[folder("bin"), folder("x"), file("x/y")], [file("x", b"now")], [folder("x"), file("x/z")]]
    root = contents(imported.take(tmp_path / "cache", docker_save(tmp_path / "a.tar", layers)))
    assert sorted(name for name in root if name.startswith("image/x")) == ["image/x", "image/x/z"]


def test_bare_roots_are_images_too(tmp_path: Path) -> None:
    tarball = tmp_path / "root.tar"
    tarball.write_bytes(layer([folder("./bin"), file("./bin/sh", b"#!", mode=0o755), file("./a\nb", b"\xff")]))
    image = imported.take(tmp_path / "cache", tarball)
    assert (image.name, image.uid, image.workdir, image.env["PATH"]) == ("root", 0, "/workspace", imported.PATH)
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "sh").write_bytes(b"#!")
    os.link(tree / "bin" / "sh", tree / "bin" / "bash")
    (tree / "out").symlink_to("/etc")
    root = contents(imported.take(tmp_path / "cache", tree))
    assert root["image/bin/sh"][4] == root["image/bin/bash"][4] and root["image/out"][5] == b"/etc"
    assert "image/a\nb" in contents(image)


def test_users_are_looked_up_in_the_image(tmp_path: Path) -> None:
    for user, wanted in (
        ("", (0, 0)),
        ("dev", (1000, 100)),
        ("1000", (1000, 100)),
        ("7:docker", (7, 42)),
        ("9", (9, 0)),
    ):
        image = imported.take(tmp_path / "c", docker_save(tmp_path / "a.tar", [BASE], User=user))
        assert (image.uid, image.gid) == wanted, user


def damaged(change: Callable[[dict[str, bytes]], None]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        layout = Layout()
        layout.image([BASE, OVER], "v1", "gzip")
        files = layout.all()
        change(files)
        path.write_bytes(layer([file(name, data) for name, data in files.items()]))
        return path

    return make


def flip(files: dict[str, bytes]) -> None:
    name = next(name for name, data in files.items() if data[:2] == b"\x1f\x8b")
    files[name] = files[name][:-9] + bytes([files[name][-9] ^ 1]) + files[name][-8:]


def cut(files: dict[str, bytes]) -> None:
    name = next(name for name, data in files.items() if data[:2] == b"\x1f\x8b")
    files[name] = files[name][: len(files[name]) // 2]


def lose(files: dict[str, bytes]) -> None:
    del files[next(name for name, data in files.items() if data[:2] == b"\x1f\x8b")]


def forge(files: dict[str, bytes]) -> None:
    name = next(name for name, data in files.items() if b"diff_ids" in data)
    files[name] = files[name].replace(b'"linux"', b'"linuX"')


def one_image(*members: Members, **config: object) -> Callable[[Path], Path]:
    return lambda path: docker_save(path, members, **config)  # type: ignore[arg-type]


def two_images(path: Path) -> Path:
    layout = Layout()
    layout.image([BASE], "v1")
    layout.image([BASE, OVER], "v2")
    return layout.tar(path)


def only_arm(path: Path) -> Path:
    layout = Layout()
    layout.image([BASE], "v1", arch="arm64")
    return layout.tar(path)


def noise(path: Path) -> Path:
    path.write_bytes(b"no archive at all" * 100)
    return path


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (damaged(flip), "layer 1 is damaged"),
        (damaged(cut), "layer 1 is damaged"),
        (damaged(lose), "it has no blobs/sha256/"),
        (damaged(forge), "its digest is not sha256:"),
        (damaged(lambda files: files.update({"index.json": b"{"})), "it is damaged"),
        (damaged(lambda files: files.update({"index.json": b"[]"})), "it is damaged"),
        (one_image(BASE, [file("../x")]), "leaves its root"),
        (one_image(BASE, [link("a", "nowhere", tarfile.LNKTYPE)]), "'a' is a hard link to 'nowhere'"),
        (one_image([link("loop", "loop"), file("loop/x")]), "a loop of links"),
        (one_image(BASE, [file("gone/x")]), "'gone' is no folder"),
        (one_image(BASE, User="nobody-we-know"), "runs as 'nobody-we-know'"),
        (one_image(BASE, [member("huge", uid=1 << 40)]), "an owner that does not exist"),
        (one_image(BASE, [link("proc", "/")]), "its /proc is a link"),
        (one_image(BASE, [link("proc", "usr")]), "its /proc is a link"),
        (one_image(BASE, [link("tmp", "../../upper")]), "its /tmp is a link"),
        (one_image(BASE, [file("dev")]), "its /dev is no folder"),
        (one_image(BASE, [member("sys", tarfile.FIFOTYPE)]), "its /sys is no folder"),
        (one_image(BASE, [file("work")], WorkingDir="/work"), "its working directory '/work' is no folder"),
        (one_image(BASE, [link("work", "/proc/1")], WorkingDir="/work/x"), "its working directory '/work/x' is no"),
        (one_image(BASE, [link("work", "work")], WorkingDir="/work"), "a loop of links"),
        (one_image(BASE, WorkingDir="/dev"), "its working directory '/dev' is no folder"),
        (one_image(BASE, Env=["A=1", "=x"]), "its environment has '=x'"),
        (one_image(BASE, Env=["A=\0"]), "its environment has 'A=\\x00'"),
        (two_images, "say which with --tag: v1, v2"),
        (only_arm, "no image for linux/amd64"),
        (noise, "no tar archive"),
        (lambda path: path, "no such file"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    with pytest.raises(VmhostError, match="can't be imported") as caught:
        imported.take(tmp_path / "cache", make(tmp_path / "bad.tar"))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_tag_chooses_and_a_name_moves(tmp_path: Path) -> None:
    path = two_images(tmp_path / "a.tar")
    one = imported.take(tmp_path / "cache", path, "mine", "v1")
    two = imported.take(tmp_path / "cache", path, "mine", "v2")
    assert one.digest != two.digest and imported.find(tmp_path / "cache", "mine") == two
    assert Path(one.folder).exists()
    with pytest.raises(VmhostError, match="no image 'v3' for linux/amd64; it has v1, v2"):
        imported.take(tmp_path / "cache", path, "mine", "v3")
    with pytest.raises(VmhostError, match="cannot have the name 'debian'"):
        imported.take(tmp_path / "cache", path, "debian", "v1")


def test_an_image_that_unpacks_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported, "LARGEST", 1 << 20)
    layout = Layout()
    layout.image([[folder("bin"), *(file(f"bin/{n}", bytes(100_000)) for n in range(20))]], "bomb", "zstd")
    with pytest.raises(VmhostError, match="it unpacks to more than 1 MiB"):
        imported.take(tmp_path / "cache", layout.tar(tmp_path / "a.tar"))
    many = docker_save(tmp_path / "b.tar", [[folder("bin"), *(file(f"bin/{n}") for n in range(300))]])
    with pytest.raises(VmhostError, match="it unpacks to more than 1 MiB"):
        imported.take(tmp_path / "cache", many)
