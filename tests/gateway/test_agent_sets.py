"""Agents side by side: one prepared sandbox, its copies, the comparison of their work, and the merge of one of them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import policies
from headrace.actors.rollout.actor import Rollout
from headrace.config import Environment as Section
from headrace.gateway.agents.merging import merge
from headrace.gateway.split import Split
from headrace.messages import subjects
from headrace.messages.rollout import PolicyRef, TurnDone
from headrace.rendering.base import Call
from headrace.vmhost.node import host
from tests.conftest import Connect
from tests.gateway.test_agents import Product
from tests.support.actors import living
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio
CACHE = str(ROOT / ".cache" / "headrace")
LINES = b"".join(b"line %d\n" % n for n in range(1, 21))


def edit(line: int, text: str) -> list[list[Call]]:
    """The turns of an agent that replaces one line of app.py and looks what the preparation left."""
    look: Call = ("terminal", {"command": "cat /tmp/prepared-$(cat built.txt); ls"})
    return [[look], [("edit_file", {"path": "app.py", "lines": str(line), "text": text})], [("finish", {})]]


SCRIPTS = {"agent-0": edit(3, "three"), "agent-1": edit(3, "drei"), "agent-2": edit(15, "wrong")}


@pytest.mark.parametrize("backend", ["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])])
async def test_agents_side_by_side_are_compared_and_one_is_merged(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setattr(policies, "script", lambda name, *_: SCRIPTS[name])
    if backend == "process":  # users' sandboxes need an isolating backend; machines would make this minutes longer
        monkeypatch.setattr(host, "demands", lambda request: set(request.requires))
    names = iter(SCRIPTS)
    monkeypatch.setattr(Split, "policy", lambda *_: PolicyRef(kind="scripted", name=next(names)))
    product = Product(connect, tmp_path, f"sets-{backend}")
    environment = Section(backend=backend, lease_s=30.0, cache_dir=CACHE)
    product.config = msgspec.structs.replace(product.config, environment=environment)
    mark = tmp_path.name
    try:
        await product.open()
        async with (
            asyncio.timeout(300),
            living(Environment, product.config, await connect("environment"), product.run),
            living(Rollout, product.config, await connect("rollout"), product.run, "product"),
        ):
            failed = await ask_when_ready(product, {"prompt": "x", "n": 2, "setup": "echo no >&2; exit 3"})
            assert failed[0] == 400 and "code 3" in failed[1]["error"]["message"], failed
            asked = {
                "prompt": "mend app.py",
                "n": 3,
                "workspace": {"files": {"app.py": LINES.decode(), "doc.md": "one\n"}},
                "setup": f"echo {mark} > built.txt; echo warm > /tmp/prepared-{mark}",
                "check": "! grep -q wrong app.py",
            }
            status, made = await product.call("POST", "/v1/agents", asked, Idempotency_Key="s")
            assert status == 201 and made["forked"] == (backend == "qemu"), made
            again = await product.call("POST", "/v1/agents", asked, Idempotency_Key="s")
            assert again[1]["set"] == made["set"], "a repeated request makes no second set"
            one, other, third = agents = [each["agent"]["id"] for each in made["agents"]]
            where = f"/v1/agent-sets/{made['set']}"
            while any(each["run"]["status"] == "RUNNING" for each in (await product.call("GET", where))[1]["agents"]):
                await asyncio.sleep(0.2)  # below the rate that the key allows
            compared = (await product.call("GET", f"{where}/comparison"))[1]

            assert [each["check"]["outcome"] for each in compared["agents"]] == ["passed", "passed", "failed"], compared
            for each in compared["agents"]:
                (file,) = each["files"]
                assert (file["path"], file["status"], file["hunks"]) == ("app.py", "modified", 1)
                assert (each["linesAdded"], each["linesRemoved"]) == (1, 1)
            pairs = {tuple(pair["agents"]): pair for pair in compared["overlaps"]}
            assert pairs[one, other]["overlappingHunks"] == [{"path": "app.py", "firstLine": 3, "lastLine": 3}]
            assert pairs[one, third]["files"] == ["app.py"] and not pairs[one, third]["overlappingHunks"]
            if backend == "qemu":  # what the preparation left outside the workspace is in every fork
                view = (await product.call("GET", where))[1]
                assert not any(each["restored"] for each in view["agents"])
                turns = await texts(product)
                assert sum("warm" in text for text in turns) == len(agents)

            clean = (await product.call("POST", f"{where}/merge", {"agent": one, "onto_agent": third}))[1]
            merged = clean["files"]["app.py"].splitlines()
            assert clean["clean"] and (merged[2], merged[14]) == ("three", "wrong")
            moved = {"files": {"app.py": LINES.decode().replace("line 3\n", "tres\n"), "doc.md": "two\n"}}
            conflict = (await product.call("POST", f"{where}/merge", {"agent": one, "onto": moved}))[1]
            (hunk,) = conflict["conflicts"]
            assert (hunk["path"], hunk["hunk"], hunk["codebase"], hunk["base"], hunk["agent"]) == (
                "app.py", 1, "tres\n", "line 3\n", "three\n",
            )  # fmt: skip
            product.key = await product.other("other")
            assert (await product.call("GET", where))[0] == 404, "another tenant's set does not exist"
    finally:
        await product.gateway.shut(1.0)


async def ask_when_ready(product: Product, body: dict[str, Any]) -> tuple[int, Any]:
    """The answer of a product whose actors have started: before that there is no sandbox."""
    while (answer := await product.call("POST", "/v1/agents", body))[0] == 503:
        await asyncio.sleep(0.2)
    return answer


async def texts(product: Product) -> list[str]:
    """The output of every call of the run."""
    filter = subjects.TURN.where(run=product.run, trajectory="*.*")
    return [
        result.output
        async for received in product.admin.history("HR_TURN", filter)
        if isinstance(received.message, TurnDone)
        for result in received.message.results
    ]


async def test_a_merge_names_every_conflict_and_loses_nothing() -> None:
    base = {"a": LINES, "gone": b"1\n", "kept": b"1\n", "bin": b"\0a", "same": b"1\n", "folder": b"1\n"}
    codebase = base | {"a": LINES.replace(b"line 2\n", b"ours\n"), "bin": b"\0b", "kept": b"2\n", "same": b"2\n"}
    del codebase["gone"]
    del codebase["folder"]
    codebase["folder/new"] = b"1\n"
    marked = LINES.replace(b"line 2\n", b"<<<<<<< theirs\n").replace(b"line 19\n", b"nineteen\n")
    agent = base | {"a": marked, "gone": b"3\n", "bin": b"\0c", "same": b"2\n", "folder": b"2\n", "new": b"n\n"}
    del agent["kept"]
    merged = await merge(base, codebase, agent, "x")
    kinds = {conflict["path"]: conflict["kind"] for conflict in merged.conflicts}
    assert kinds == {"a": "hunk", "gone": "delete_modify", "kept": "delete_modify", "bin": "binary",
                     "folder": "delete_modify", "folder/new": "file_folder"}  # fmt: skip
    assert merged.changed["gone"] == b"3\n" and merged.changed["bin.agent-x"] == b"\0c" and not merged.deleted
    assert merged.changed["new"] == b"n\n" and "kept" not in merged.changed and "same" not in merged.changed
    (hunk,) = [conflict for conflict in merged.conflicts if conflict["kind"] == "hunk"]
    assert (hunk["codebase"], hunk["agent"]) == ("ours\n", "<<<<<<< theirs\n"), (
        "a text that looks like a marker is text"
    )
    assert b"nineteen\n" in merged.changed["a"] and b"line 20\n" in merged.changed["a"]
