"""The search actor over a real broker: answers by words while vectors are missing, then by both, and the reply names
the mode."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headrace.actors.search import Search
from headrace.bus.connection import Bus
from headrace.bus.errors import Unrecoverable
from headrace.config import Config, Environment
from headrace.config import Search as Section
from headrace.harness.tools.search.session import SearchSession
from headrace.harness.tools.toolbox import Toolbox, with_search
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Op, OpResult, PullTree
from headrace.messages.search import SearchLost, SearchReply, SearchRequest
from headrace.messages.tasks import Task, TaskRef
from headrace.search import client
from headrace.search.client import SearchClient
from headrace.search.index import Index
from headrace.search.local import LocalSearcher
from headrace.search.models import SearchModelError, read
from headrace.search.service import open_indexes
from headrace.search.tree import content_hash
from tests.support import embedding_model
from tests.support.actors import living
from tests.support.records import of

pytestmark = pytest.mark.anyio
Connect = Callable[..., Awaitable[Bus]]

FILES = {
    "shop/cart.py": b"def total(items):\n    return sum(items)\n\n\ndef clear(cart):\n    cart.items = []\n",
    "shop/mail.py": b"def send(user):\n    return user.mail\n",
}
TOOL, RUN = "semantic_search", "r-search"
TASK = of(Task, ref=TaskRef("s", "t"), files=FILES, tools=("semantic_search",))


class Files:
    """A sandbox over a dictionary that counts the pulled files."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.pulled = 0

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        assert isinstance(op, PullTree)
        self.pulled += bool(op.patterns)
        digest = content_hash(repr(sorted(self.files.items())).encode())
        return OpResult(files=self.files if op.patterns else {}, digest=digest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [data.decode() for data in FILES.values()]
    return embedding_model.write(tmp_path_factory.mktemp("model"), texts)


def config(model: Path | str, cache: Path, wait_s: float = 60.0) -> Config:
    return Config(
        search=Section(model=str(model), tokens=32, wait_s=wait_s), environment=Environment(cache_dir=str(cache))
    )


def request(**fields: Any) -> SearchRequest:
    return SearchRequest(**{"run": RUN, "template": "t1", "query": "send mail", "files": FILES, **fields})


async def test_searches_follow_the_workspace_and_a_replay_repeats_them(
    connect: Connect, folder: Path, tmp_path: Path
) -> None:
    bus, rollout = await connect("search"), await connect("rollout")
    sandbox, results = Files(), list[ToolResult]()
    call = ToolCall(id="0.0", name="semantic_search", arguments={"query": "send a mail to the user"})
    async with living(Search, config(folder, tmp_path), bus, RUN):
        session = SearchSession(SearchClient(rollout, RUN), RUN, "t1")
        box = Toolbox(("semantic_search",), search=session)
        results.append(await box.run(call, sandbox, TASK))
        results.append(await box.run(call, sandbox, TASK))
        assert sandbox.pulled == 1, "an unchanged workspace is not read again"
        sandbox.files["shop/post.py"] = b"def send(user):\n    return user.mail\n"
        del sandbox.files["shop/mail.py"]
        results.append(await box.run(call, sandbox, TASK))
    first, again, moved = (result.retrieved for result in results)
    assert first is not None and moved is not None and first == again
    assert first.mode == "hybrid" and len(first.chunks) == 3 and first.root != moved.root
    assert "shop/mail.py\n1:def send(user):" in results[0].output and "shop/mail.py" not in results[2].output
    indexes = open_indexes(read(folder), 32, None)
    replay = SearchSession(LocalSearcher(indexes), RUN, "t1", recorded={"0.0": first})
    repeated = await Toolbox(("semantic_search",), search=replay).run(call, Files(), TASK)
    assert (repeated.output, repeated.retrieved) == (results[0].output, results[0].retrieved)


async def test_words_answer_while_vectors_are_missing_and_a_replay_may_ask_for_them(
    connect: Connect, folder: Path, tmp_path: Path
) -> None:
    bus, rollout = await connect("search"), await connect("rollout")
    async with living(Search, config(folder, tmp_path, wait_s=0.0), bus, f"{RUN}-2") as actor:
        asker = SearchClient(rollout, f"{RUN}-2")
        ask = request(run=f"{RUN}-2")
        early = await asker.ask(ask)
        assert early.mode == "keyword" and early.hits[0].path == "shop/mail.py"
        late = await asker.ask(msgspec.structs.replace(ask, mode="hybrid"))
        assert late.mode == "hybrid" and late.root == early.root and len(actor._indexes.vectors) == 3
        assert (await asker.ask(msgspec.structs.replace(ask, mode="keyword"))).hits == early.hits
        unknown = await asker.ask(request(run=f"{RUN}-2", base="f" * 32))
        assert unknown.failure == "unknown_base"


async def test_a_restarted_actor_is_sent_the_whole_workspace_and_reads_its_vectors(
    connect: Connect, folder: Path, tmp_path: Path
) -> None:
    rollout, sandbox, run = await connect("rollout"), Files(), f"{RUN}-3"
    session = SearchSession(SearchClient(rollout, run), run, "t1")
    async with living(Search, config(folder, tmp_path), await connect("search"), run):
        before = await session.find("total of items", 3, sandbox.call, "1")
    async with living(Search, config(folder, tmp_path, wait_s=0.0), await connect("search"), run):
        after = await session.find("total of items", 3, sandbox.call, "2")
    assert after.retrieved == before.retrieved and after.mode == "hybrid", "the first one's vectors are in the cache"


async def test_without_an_actor_a_search_is_a_failure_of_the_infrastructure(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.0)
    session = SearchSession(SearchClient(await connect("rollout"), "r-none"), "r-none", "t1")
    call = ToolCall(id="0.0", name="semantic_search", arguments={"query": "mail"})
    with pytest.raises(SearchLost, match="no search actor answers"):
        await Toolbox(("semantic_search",), search=session).run(call, Files(), TASK)


async def test_nodes_of_a_run_must_have_one_model(connect: Connect, folder: Path, tmp_path: Path) -> None:
    other = embedding_model.write(tmp_path / "other", ["other words"])
    async with living(Search, config(folder, tmp_path), await connect("search"), f"{RUN}-4"):
        with pytest.raises(Unrecoverable, match=r"headrace\.search: model has source hash"):
            await Search(config(other, tmp_path), await connect("search"), f"{RUN}-4", "s2").start()
    with pytest.raises(SearchModelError, match="the search actor has no model"):
        await Search(config("none", tmp_path), await connect("search"), f"{RUN}-5", "s3").start()


@pytest.mark.parametrize("cached", [False, True], ids=["first vector", "query"])
async def test_a_model_that_cannot_be_used_ends_the_actor_and_answers_those_that_wait(
    connect: Connect, folder: Path, tmp_path: Path, cached: bool
) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    state = load_file(model / "model.safetensors")
    state.pop("encoder.layer.1.output.LayerNorm.bias")
    save_file(state, model / "model.safetensors")
    run = f"{RUN}-{7 + cached}"
    rollout, actor = await connect("rollout"), Search(config(model, tmp_path), await connect("search"), run, "s7")
    await actor.start()
    try:
        if cached:  # every chunk has its vector already
            pieces = Index.of({path: content_hash(data) for path, data in FILES.items()}, FILES).pieces
            names = sorted({piece.hash for piece in pieces})
            actor._indexes.vectors.put("t1", names, np.ones((len(names), 64), np.float32))
        reply = await SearchClient(rollout, run).ask(request(run=run, mode="hybrid"))
        assert reply.failure == "not_ready" and "no tensor 'encoder.layer.1.output.LayerNorm.bias'" in reply.detail
        error = await actor.failed
        assert isinstance(error, SearchModelError)
    finally:
        await actor.shut(1.0)


async def test_another_runs_workspace_is_refused(connect: Connect, folder: Path, tmp_path: Path) -> None:
    rollout = await connect("rollout")
    async with living(Search, config(folder, tmp_path), await connect("search"), f"{RUN}-6"):
        reply = await SearchClient(rollout, f"{RUN}-6").ask(request(run="someone-else"))
    assert isinstance(reply, SearchReply) and reply.failure == "refused"


def test_without_a_model_a_task_offers_keyword_search_by_its_name() -> None:
    default = msgspec.structs.replace(TASK, tools=())
    assert "semantic_search" not in with_search(default, False).tools
    assert "keyword_search" in with_search(default, False).tools
    assert with_search(default, True) is default
    both = msgspec.structs.replace(TASK, tools=("keyword_search", "semantic_search", "finish"))
    assert with_search(both, False).tools == ("keyword_search", "finish")
