"""A workspace whose index would cost too much work: its first files by path are searched."""

import asyncio

import pytest

from headrace.harness.tools.search import session
from headrace.harness.tools.search.semantic import MOST_QUERY
from headrace.harness.tools.search.session import SearchSession
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.search import SearchRequest
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.search import chunks, index, service
from headrace.search.chunks import WorkExceeded
from headrace.search.index import Index, IndexPart
from headrace.search.service import Indexes
from headrace.tasks.local import LocalFiles
from tests.support.word_search import WordSearcher

FILES = {f"m{number}.py": f"def send_{number}(mail):\n    return {number}\n".encode() for number in range(8)}
LIMIT = 4 * IndexPart("m0.py", FILES["m0.py"]).work


def limited(patch: pytest.MonkeyPatch, most: int = LIMIT) -> Indexes:
    patch.setattr(index, "MOST_WORK", most)
    return WordSearcher().indexes


def request(**fields: object) -> SearchRequest:
    return SearchRequest(**{"run": "r", "template": "t", "query": "send", "mode": "keyword", **fields})  # type: ignore[arg-type]


def paths(indexes: Indexes, state: Index | None) -> list[str]:
    assert state is not None
    return sorted(hit.path for hit in indexes.find(state, "send", 100, "keyword").hits)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("x.py", b"def a():0\n" * 5_000),
        ("x.py", b'f"{a\n' * 8_000),
        ("x.txt", b" ".join(b"%x" % number for number in range(0xA0000, 0xA4000))),
        (
            "x.py",
            b"".join(b" " * at + b"class " + b"A" * 5000 + b":\n" for at in range(90))
            + b" " * 90
            + b"def a():0\n" * 90,
        ),
        ("d/" * 90 + "y" * 200 + ".py", b"def a():0\n" * 2_000),
    ],
    ids=["definitions", "errors", "words", "names", "path"],
)
def test_a_hostile_file_ends_at_the_limit(path: str, data: bytes) -> None:
    with pytest.raises(WorkExceeded):
        IndexPart(path, data, 20_000)
    assert chunks.cut("z.py", b"def after(): pass\n"), "the parser is used again"


def test_files_beyond_the_limit_are_left_out_in_the_order_of_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = WordSearcher().indexes.update(request(files=FILES))
    assert unlimited is not None and unlimited.left_out == 0
    indexes = limited(monkeypatch)
    whole = indexes.update(request(files=FILES))
    assert whole is not None and whole.left_out == 4 and whole.root != unlimited.root
    assert paths(indexes, whole) == ["m0.py", "m1.py", "m2.py", "m3.py"]
    assert indexes.find(whole, "send", 5, "keyword").left_out == 4
    fits = indexes.update(request(files={path: FILES[path] for path in sorted(FILES)[:4]}))
    assert fits is not None and fits.left_out == 0
    assert fits.root == WordSearcher().indexes.update(request(files=dict(sorted(FILES.items())[:4]))).root  # type: ignore[union-attr]
    grown = indexes.update(request(base=fits.root, files=dict(sorted(FILES.items())[4:])))
    assert grown is not None and grown.root == whole.root and paths(indexes, grown) == paths(indexes, whole)


def test_a_file_that_enters_the_index_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = limited(monkeypatch)
    whole = indexes.update(request(files=FILES))
    assert whole is not None
    assert indexes.update(request(base=whole.root, deleted=("m0.py",))) is None, "the actor has not m4.py"
    rest = {path: data for path, data in FILES.items() if path != "m0.py"}
    assert paths(indexes, indexes.update(request(files=rest))) == ["m1.py", "m2.py", "m3.py", "m4.py"]
    less = indexes.update(request(base=whole.root, deleted=("m7.py",)))
    assert paths(indexes, less) == paths(indexes, whole) and less is not None and less.left_out == 3


def test_indexes_that_hold_much_are_dropped_and_equal_files_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_HELD", LIMIT)
    indexes = WordSearcher().indexes
    states = [indexes.update(request(files={"m0.py": FILES["m0.py"], f"n{number}.md": b""})) for number in range(9)]
    assert all(state is not None and state.root in indexes._indexes for state in states[-3:])
    assert len({id(state.parts[0]) for state in states if state is not None}) == 1
    other = [indexes.update(request(files={"m0.py": b"def send():\n    return %d\n" % number})) for number in range(9)]
    assert other[0] is not None and indexes.update(request(base=other[0].root, files={})) is None
    held = {id(part): part.work for state in indexes._indexes.values() for part in state.parts}
    assert sum(held.values()) == indexes._held <= LIMIT


def answer(files: dict[str, bytes], query: str) -> ToolResult:
    box = Toolbox(("semantic_search",), search=SearchSession(WordSearcher(), "r", "t"))
    task = Task(ref=TaskRef("s", "t"), family="f", prompt="p", files=files, allowed=("**",), tests=TestPlan())
    call = ToolCall(id="0.0", name="semantic_search", arguments={"query": query})
    return asyncio.run(box.run(call, LocalFiles(files), task))


def test_the_tool_says_which_files_it_did_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not searched" not in answer(FILES, "send").output
    monkeypatch.setattr(index, "MOST_WORK", LIMIT)
    assert answer(FILES, "send").output.endswith(
        "[4 files are not searched: the repository is too large to index, so only the first files by path are]"
    )


def test_a_long_query_and_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    long = answer(FILES, "send " * 1000)
    assert not long.ok and long.output == f"query has 5000 characters; at most {MOST_QUERY} are allowed"
    monkeypatch.setattr(session, "MOST_NAMES", 10)
    many = answer({f"a/b/m{number}.py": b"" for number in range(4)}, "send")
    assert not many.ok and many.output.endswith("more than 10 names, too many to search")
