"""Chunks, the Merkle tree, keyword scores, vectors on disk, and indexes that follow a workspace."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.messages.search import SearchRequest
from headrace.search.chunks import MOST_LINES, cut, indexed
from headrace.search.embeddings import Vectors
from headrace.search.index import Index
from headrace.search.keywords import Bag, postings, postings_of, scores, words
from headrace.search.local import LocalSearcher
from headrace.search.service import Indexes
from headrace.search.tree import changes, content_hash, tree
from tests.support.word_search import WordSearcher

SHOP = b'''"""A shop."""

import os

RATE = 0.2


@cached
def total(items):
    return sum(items)


class Cart:
    """Things."""

    def add(self, item):
        def inner():
            return item
        return inner()

    def clear(self):
        self.items = []


if os.name:
    def late(): ...
'''


def test_functions_and_methods_are_chunks_with_qualified_names() -> None:
    chunks = [(chunk.name, chunk.first, len(chunk.lines)) for chunk in cut("shop/cart.py", SHOP)]
    assert ("total", 8, 3) in chunks, "a decorator belongs to its function"
    assert ("Cart.add", 16, 4) in chunks, "a nested function belongs to the one around it"
    assert ("Cart.clear", 21, 2) in chunks
    assert ("late", 26, 1) in chunks
    covered = sorted(number for _, first, count in chunks for number in range(first, first + count))
    assert len(covered) == len(set(covered)), "no line stands in two chunks"
    text = SHOP.decode().split("\n")
    assert {number for number, line in enumerate(text, 1) if line.strip()} <= set(covered)


def test_a_chunk_is_named_by_its_text_wherever_it_stands() -> None:
    moved = {chunk.name: chunk.hash() for chunk in cut("shop/cart.py", b"# a comment\n" + SHOP)}
    first = {chunk.name: chunk.hash() for chunk in cut("shop/cart.py", SHOP)}
    assert moved["total"] == first["total"]
    assert {c.hash() for c in cut("other.py", SHOP)}.isdisjoint(first.values()), "the path is part of the text"


@pytest.mark.parametrize("data", [b"", b"\0binary", b"x" * ((1 << 20) + 1), b"\n\n \n"])
def test_empty_binary_and_huge_files_have_no_chunks(data: bytes) -> None:
    assert cut("a.py", data) == []


def test_long_functions_and_prose_are_split() -> None:
    body = "\n".join(f"    x{n} = {n}" for n in range(200))
    pieces = cut("a.py", f"def long():\n{body}\n".encode())
    assert [chunk.first for chunk in pieces] == [1, 1 + MOST_LINES, 1 + 2 * MOST_LINES]
    prose = cut("a.md", "\n\n".join(f"Sentence {n}." for n in range(100)).encode())
    assert len(prose) > 2 and sum(len(chunk.lines) for chunk in prose) == 199
    broken = cut("a.py", b"def f(:\n  return (((\n\xff\xfe\nclass")
    assert any("return" in line for chunk in broken for line in chunk.lines)
    assert indexed("src/A.PY") and not indexed("image.png") and not indexed("Makefile")


def test_a_merkle_tree_finds_exactly_what_changed() -> None:
    files = {f"a/b{n}/c{m}.py": content_hash(b"%d" % m) for n in range(4) for m in range(4)} | {"top.py": "x"}
    before = tree(files)
    assert tree(dict(reversed(files.items()))).hash == before.hash
    after = tree({**{k: v for k, v in files.items() if k != "a/b1/c1.py"}, "a/b2/c2.py": "new", "z/y.py": "n"})
    assert changes(before, after) == (["a/b2/c2.py", "z/y.py"], ["a/b1/c1.py"])
    assert changes(before, before) == ([], [])
    assert tree({"ab/c": "1"}).hash != tree({"a": "1", "b/c": "1"}).hash


def test_keyword_scores_prefer_rare_words_and_short_chunks() -> None:
    assert words("parseHTTPRequests user_names2") == ["parse", "http", "request", "user", "name", "2"]
    bags = [Bag("def send_mail(user)"), Bag("def user(user): return user"), Bag("nothing here")]
    lengths = np.array([bag.length for bag in bags], dtype=np.float64)
    parts = [(0, postings(bags[:2])), (2, postings(bags[2:]))]
    chunk_scores = scores("mail user", parts, lengths)
    assert chunk_scores[0] > chunk_scores[1] > chunk_scores[2] == 0.0
    assert np.array_equal(chunk_scores, scores("mail user", [(0, postings(bags))], lengths)), (
        "however files divide chunks"
    )
    assert np.array_equal(chunk_scores, scores("mail user", [(0, postings_of("mail user", bags))], lengths))
    assert not scores("zebra", parts, lengths).any()


class Letters:
    """Vectors that follow from the letters of a text: near for texts with the same ones."""

    width = 26

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed(self, texts: list[str], batch: int = 8) -> NDArray[np.float32]:
        if batch > 1:
            self.embedded += texts
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], dtype=np.float32)
        unit: NDArray[np.float32] = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)
        return unit


def searcher(folder: Path | None = None) -> tuple[LocalSearcher, Letters]:
    model = Letters()
    return LocalSearcher(Indexes("letters", lambda: model, 26, folder)), model


def request(**fields: object) -> SearchRequest:
    return SearchRequest(**{"run": "r", "template": "t1", "query": "total of the items", **fields})  # type: ignore[arg-type]


FILES = {"shop/cart.py": SHOP, "shop/mail.py": b"def send(to):\n    return to\n", "logo.png": b"\x89"}


def test_an_edit_embeds_only_the_chunks_that_changed() -> None:
    search, model = searcher()
    first = search.answer(request(files=FILES))
    assert first.mode == "hybrid" and first.hits[0].path == "shop/cart.py"
    count = len(model.embedded)
    edited = {"shop/mail.py": b"def send(to):\n    return to\n\n\ndef drop(to): ...\n"}
    second = search.answer(request(base=first.root, files=edited))
    assert second.root != first.root and len(model.embedded) == count + 1
    back = search.answer(request(base=second.root, files={"shop/mail.py": FILES["shop/mail.py"]}))
    assert back == first and len(model.embedded) == count + 1
    less = search.answer(request(base=first.root, deleted=("shop/cart.py",), query="send"))
    assert {hit.path for hit in less.hits} == {"shop/mail.py"}
    assert search.answer(request(base="0" * 32)).failure == "unknown_base"


def test_an_index_is_equal_whichever_way_it_was_reached() -> None:
    one, other = searcher()[0], searcher()[0]
    whole = one.answer(request(files=FILES))
    part = other.answer(request(files={"shop/mail.py": FILES["shop/mail.py"], "x.py": b"x = 1\n"}))
    grown = other.answer(request(base=part.root, files={"shop/cart.py": SHOP}, deleted=("x.py",)))
    assert grown.retrieved == whole.retrieved and grown.hits == whole.hits


def test_a_templates_vectors_are_read_by_the_next_process(tmp_path: Path) -> None:
    first, model = searcher(tmp_path)
    before = first.answer(request(files=FILES))
    assert model.embedded
    second, again = searcher(tmp_path)
    assert second.answer(request(files=FILES)) == before
    assert again.embedded == []
    (file,) = tmp_path.rglob("*.vectors")
    torn = file.read_bytes()[:-7]
    file.write_bytes(torn)
    third, partly = searcher(tmp_path)
    assert third.answer(request(files=FILES)) == before
    assert len(partly.embedded) == 1, "a torn record is written again"
    fourth, nothing = searcher(tmp_path)
    assert fourth.answer(request(files=FILES)) == before
    assert nothing.embedded == []


def test_keyword_mode_needs_no_vector() -> None:
    search, model = searcher()
    reply = search.answer(request(files=FILES, mode="keyword", query="send"))
    assert reply.mode == "keyword" and reply.hits[0].path == "shop/mail.py" and not model.embedded
    assert search.answer(request(files=FILES, mode="keyword", query="zebra")).hits == ()
    assert search.answer(request(files={}, query="send")).hits == ()


def test_vectors_lose_little_in_int8() -> None:
    vectors = np.random.default_rng(1).normal(size=(20, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    store = Vectors(None, 384)
    names = [f"{n:032x}" for n in range(20)]
    store.put("", names, vectors)
    for name, vector in zip(names, vectors, strict=True):
        row, scale = store.get(name)
        assert float((row.astype(np.float32) * scale * vector).sum()) > 0.999
    assert Index.of({}, {}).missing(store) == []


@pytest.mark.parametrize(
    ("path", "data", "chunks"),
    [
        ("a/" * 1500 + "x.py", b"total = 1\n", 0),
        ("x.py", "".join(" " * depth + "if total:\n" for depth in range(900)).encode(), 23),
        ("x.py", "".join(" " * depth + "class total:\n" for depth in range(900)).encode(), 100),
    ],
)
def test_a_workspace_that_is_nested_too_deep_is_searched(path: str, data: bytes, chunks: int) -> None:
    files = {path: data, "y.py": b"def total(): pass\n"}
    indexes = WordSearcher().indexes
    index = indexes.update(SearchRequest(run="r", template="t", query="total", files=files))
    assert index is not None
    reply = indexes.find(index, "total", 1000, "keyword")
    assert "y.py" in {hit.path for hit in reply.hits} and reply.chunks - 1 >= chunks


def test_a_damaged_vector_is_computed_again(tmp_path: Path) -> None:
    vectors = Vectors(tmp_path, 4)
    vectors.put("t", ["0" * 32, "1" * 32], np.ones((2, 4), np.float32))
    data = bytearray((tmp_path / "t.vectors").read_bytes())
    data[16:20] = b"\xff\xff\xff\x7f"
    (tmp_path / "t.vectors").write_bytes(data)
    again = Vectors(tmp_path, 4)
    again.load("t")
    assert "0" * 32 not in again and "1" * 32 in again


@pytest.mark.parametrize("template", ["../x", "a/b", "x" * 65, "a\0", "a\n"])
def test_a_template_that_is_no_name_of_a_file_is_refused(template: str) -> None:
    request = SearchRequest(run="r", template=template, query="total")
    with pytest.raises(msgspec.ValidationError, match="template"):
        msgspec.json.decode(msgspec.json.encode(request), type=SearchRequest)
