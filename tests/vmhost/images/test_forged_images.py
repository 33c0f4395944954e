"""Any bytes are a container image or are refused in one sentence: layers, manifests, configurations, archives."""

import copy
import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from tests.archives.test_tars import archives
from tests.support import forged
from tests.support.archives import Layout, configuration, file, folder, layer, link, packed

ROOT = layer([folder("bin"), file("bin/sh", b"#!"), link("usr", "bin")])
KIND = "application/vnd.oci.image.manifest.v1+json"


def documents(layers: list[bytes], how: str = "") -> tuple[Layout, dict[str, Any], dict[str, Any]]:
    """A layout with these layers, its manifest and its configuration."""
    layout = Layout()
    manifest = {"config": {}, "layers": [layout.blob(packed(one, how)) for one in layers]}
    return layout, manifest, json.loads(configuration(layers, User="0", WorkingDir="/", Env=["A=b"]))


def written(path: Path, layout: Layout, manifest: Any, config: Any, index: Any = None) -> Path:
    if isinstance(manifest, dict) and manifest.get("config") == {}:
        manifest = manifest | {"config": layout.blob(json.dumps(config).encode())}
    layout.index = [layout.blob(json.dumps(manifest).encode(), KIND)]
    files = layout.all() | ({} if index is None else {"index.json": json.dumps(index).encode()})
    path.write_bytes(layer([file(name, data) for name, data in files.items()]))
    return path


def refused(path: Path, cache: Path) -> str:
    """The sentence that refuses an image; empty for one that was taken."""
    try:
        imported.take(cache, path)
    except VmhostError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 600
        assert [left.name for left in cache.iterdir()] == ["lock"]
        return str(error)
    return ""


DEEP = "a/" * 100_000 + "a"
LAYERS = {name: data for name, data in forged.TARS.items() if "stream" not in name} | {
    "a path of 200,000 bytes": forged.pax(path=DEEP) + forged.file(b"a") + forged.END,
    "a link of 200,000 bytes": forged.pax(linkpath=DEEP) + forged.header(b"bin/x", 0, b"2", b"y") + forged.END,
    "a name of 256 bytes": forged.pax(path="bin/" + "x" * 256) + forged.file(b"a") + forged.END,
    "links that lead deeper and deeper": forged.pax(linkpath="a/" * 1900 + "m")
    + forged.header(b"l", 0, b"2", b"y")
    + forged.pax(path="a/" * 1900 + "m", linkpath="a/" * 1900 + "n")
    + forged.header(b"m", 0, b"2", b"y")
    + forged.file(b"l/x")
    + forged.END,
    "20,000 devices": 20_000 * forged.header(b"null", 0, b"3") + forged.END,
}
LAWFUL = {"a symbolic link", "a device", "an absolute name", "no name", "a name that is not UTF-8"}
LAWFUL |= {"a pax name that is not UTF-8", "a path of 2,000 bytes"}
"""Refused in an upload, but an image may have them; a path that begins with a slash lies in the image."""


@pytest.mark.parametrize("what", sorted(LAYERS.keys() - LAWFUL))
def test_a_forged_layer_is_refused_in_one_sentence_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(imported, "LARGEST", 4 << 20)
    layout, manifest, config = documents([ROOT, LAYERS[what]], "zstd")
    path = written(tmp_path / "a.tar", layout, manifest, config)
    del layout
    tracemalloc.start()
    try:
        sentence = refused(path, tmp_path / "c")
        assert any(word in sentence for word in ("layer 2", "longer than", "link", "leaves", "unpacks to more")), (
            sentence
        )
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", sorted(LAWFUL))
def test_a_strange_layer_is_part_of_an_image(tmp_path: Path, what: str) -> None:
    layout, manifest, config = documents([ROOT, LAYERS[what]], "gzip")
    assert refused(written(tmp_path / "a.tar", layout, manifest, config), tmp_path / "c") == ""


ODD: list[Any] = [None, True, -1, 10**30, "", "x", "sha256:" + "../" * 20, [], {}, [[]], [{}], {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a path."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_every_odd_value_in_every_document_is_refused_or_harmless(tmp_path: Path, step: int) -> None:
    layout, manifest, config = documents([ROOT], "gzip")
    written(tmp_path / "good.tar", layout, manifest, config)
    index = {"manifests": layout.index}
    number = 0
    for which, document in enumerate((manifest, config, index)):
        for path in places(document):
            for odd in ODD[::step]:
                parts = [manifest, config, index]
                parts[which] = put(document, path, odd)
                forged_one = written(tmp_path / "a.tar", layout, parts[0], parts[1], parts[2] if which == 2 else None)
                number += bool(refused(forged_one, tmp_path / "c"))
                shutil.rmtree(tmp_path / "c")
    assert number > 25


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[" * 200_000, "damaged"), ("9" * 5000, "damaged"), ('{"manifests": {"a": 1}}', "damaged"), ("{}", "damaged")],
)
def test_a_forged_index_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "i").mkdir()
    for name, content in {"oci-layout": "{}", "index.json": text}.items():
        (tmp_path / "i" / name).write_text(content)
    assert sentence in refused(tmp_path / "i", tmp_path / "c")


def test_an_image_of_too_many_layers_is_refused(tmp_path: Path) -> None:
    layout, manifest, config = documents([ROOT])
    manifest["layers"] *= 1001
    config["rootfs"]["diff_ids"] *= 1001
    assert "1001 layers" in refused(written(tmp_path / "a.tar", layout, manifest, config), tmp_path / "c")


def holds(data: bytes, outer: bool) -> None:
    """As a layer of an image, or as the archive of an image itself."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if outer:
            (place / "a.tar").write_bytes(data)
        else:
            layout, manifest, config = documents([ROOT, data])
            written(place / "a.tar", layout, manifest, config)
        refused(place / "a.tar", place / "c")


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(archives(), st.booleans())
def test_any_bytes_are_an_image_or_one_refusal(data: bytes, outer: bool) -> None:
    holds(data, outer)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, database=None)
@given(archives(), st.booleans())
def test_very_many_bytes_are_an_image_or_one_refusal(data: bytes, outer: bool) -> None:
    holds(data, outer)
