"""Scripted policies and tools over the agent protocol of real sandboxes (the process backend: same guest code)."""

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from headrace.config import Environment
from headrace.harness.loop import run_episode
from headrace.harness.scripted import NAMES, ScriptedEngine, script
from headrace.harness.sync_tools import answer
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages import tasks as task_messages
from headrace.messages.rollout import RolloutRequest, ToolCall
from headrace.messages.sandbox import Acquire, PullTree, RunTests, Sandbox, WriteFiles
from headrace.messages.tasks import Oracle, Task
from headrace.rendering import schemas
from headrace.rendering.terse import TerseRenderer
from headrace.tasks import open_suite
from headrace.tasks.generated import traces
from headrace.tasks.generated.repositories import Made, make
from headrace.tasks.local import LocalFiles
from headrace.vmhost.node.host import Host
from tests.support.records import of

pytestmark = pytest.mark.anyio
Fresh = Callable[[dict[str, bytes]], Awaitable[Sandbox]]


@pytest.fixture(scope="module")
async def fresh() -> AsyncIterator[Fresh]:
    host = await Host.open(Environment(backend="process", max_vms=64))
    numbers = itertools.count()

    async def acquire(files: dict[str, bytes]) -> Sandbox:
        number = next(numbers)
        return await host.acquire(of(Acquire, run="r1", group=f"g{number // 8:06d}", slot=number % 8, files=files))

    yield acquire
    await host.close()


async def passes(fresh: Fresh, task: Task, oracle: Oracle, after: dict[str, bytes]) -> bool:
    """Judge as the actor does: the allowed changes alone, hidden tests from the host, the expected names."""
    sandbox = await fresh(task.files)
    await sandbox.call(WriteFiles(files={path: after[path] for path in oracle.solution} | oracle.hidden))
    result = await sandbox.call(RunTests(plan=oracle.tests))
    return {test.name for test in result.tests if test.outcome == "passed"} == set(oracle.expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suite", ["generated/heldout", "generated/unseen"])
async def test_scripted_policies(
    fresh: Fresh, renderer: TerseRenderer, request_for: Callable[..., RolloutRequest], name: str, suite: str
) -> None:
    tasks = open_suite(suite)
    for id in tasks.ids()[:4]:
        task, oracle = tasks.task(id), tasks.oracle(id)
        sandbox = await fresh(task.files)
        episode = await run_episode(
            engine=ScriptedEngine(script(name, task, oracle), renderer),
            sandbox=sandbox,
            renderer=renderer,
            request=request_for(task.ref),
            task=task,
        )
        assert episode.outcome == "finished" and episode.malformed_calls == 0
        after = (await sandbox.call(PullTree())).files
        assert await passes(fresh, task, oracle, after) is (name == "oracle")
        reports = [result.output for turn in episode.turns for result in turn.results if "passed" in result.output]
        assert reports == {"oracle": ["2 passed"], "idle": [], "edit-tests": ["1 passed"]}[name]


async def test_traces_read_what_a_sandbox_says(fresh: Fresh, renderer: TerseRenderer) -> None:
    """The same calls in a real sandbox give the same text as in the dictionary that traces are made with."""
    rng = random.Random(11)
    for number, fault in enumerate(["", "", "", "unread", "wrong", "careless", "", "wrong"]):
        made = make("train", 2_000_000 + number)
        real = await fresh(made.task.files)
        box = Toolbox(tuple(schemas.BY_NAME))
        seen: list[tuple[list[str], list[str]]] = []

        def both(task: Task, sandbox: Sandbox, calls: object, seen: list[object] = seen) -> list[object]:  # type: ignore[assignment]
            results = answer(task, sandbox, calls)  # type: ignore[arg-type]
            seen.append((calls, results))
            return results  # type: ignore[return-value]

        traces.play(made, fault, rng, both)  # type: ignore[arg-type]
        for turn, (calls, expected) in enumerate(seen):
            for call, result in zip(calls, expected, strict=True):
                got = await box.run(call, real, made.task, f"{turn}/")  # type: ignore[arg-type]
                assert (got.output, got.ok) == (result.output, result.ok)  # type: ignore[attr-defined]
        assert seen


ODD_CALLS = [
    ("search", {"query": "def "}),
    ("search", {"query": "return .* [+-]"}),
    ("search", {"query": "zzz"}),
    ("search", {"query": "import", "glob": "test_*.py"}),
    ("search", {"query": ":", "glob": "*.md"}),
    ("read_file", {"path": "README.md"}),
    ("read_file", {"path": "nothing.py"}),
    ("read_file", {"path": "test_visible.py", "lines": "2-4"}),
    ("edit_file", {"path": "nothing.py", "lines": "1", "text": "x"}),
    ("edit_file", {"path": "README.md", "lines": "99", "text": "x"}),
    ("edit_file", {"path": "README.md", "lines": "0", "text": "x"}),
    ("edit_file", {"path": "README.md", "lines": "2-1", "text": "between"}),
    ("read_file", {"path": "README.md"}),
    ("edit_file", {"path": "test_visible.py", "lines": "1", "text": "this is no python"}),
    ("run_tests", {}),
    ("edit_file", {"path": "test_visible.py", "lines": "1", "text": "from nowhere import nothing"}),
    ("run_tests", {}),
]


async def test_odd_calls_get_the_same_answers_too(fresh: Fresh) -> None:
    made = make("train", 3_000_000)
    real, local, box = await fresh(made.task.files), LocalFiles(made.task.files), Toolbox(tuple(schemas.BY_NAME))
    for number, (name, arguments) in enumerate(ODD_CALLS):
        call = ToolCall(id=str(number), name=name, arguments=arguments)
        got, expected = await box.run(call, real, made.task), await box.run(call, local, made.task)
        assert (name, arguments, got.output, got.ok) == (name, arguments, expected.output, expected.ok)


@pytest.fixture
def shop() -> Made:
    made = make("train", 3_000_001)
    files = {
        "src/shop/cart.py": b"class Cart:\n    def __init__(self):\n        self.itemPrices = []\n\n"
        b"    def add_item(self, price):\n        self.itemPrices.append(price)\n\n\n"
        b"def grand_total(cart):\n    return sum(cart.itemPrices) + undefined_fee\n",
        "src/shop/mail.py": b"def send_mail(address, text):\n    return f'{address}: {text}'\n",
        "broken.py": b"def f(:\n    pass\n",
        "test_shop.py": b"def test_bad():\n    assert 1 == 2, 'one is not two'\n\n\ndef test_good():\n    pass\n",
    }
    plan = msgspec.structs.replace(made.task.tests, paths=("test_shop.py",))
    return msgspec.structs.replace(made, task=msgspec.structs.replace(made.task, files=files, tests=plan))


@pytest.mark.parametrize(
    ("name", "arguments", "ok", "says"),
    [
        ("list_files", {}, True, "broken.py\nsrc/shop/cart.py\nsrc/shop/mail.py\ntest_shop.py"),
        ("list_files", {"glob": "src/**/m*.py"}, True, "src/shop/mail.py"),
        ("list_files", {"glob": "*.rs"}, True, "no files"),
        ("write_file", {"path": "new/a.txt", "text": "hello"}, True, "ok"),
        ("write_file", {"path": "../a.txt", "text": "hello"}, False, "may not leave"),
        ("terminal", {"command": "echo hi; echo no >&2; exit 3"}, False, "hi\nno\nexit code 3"),
        ("terminal", {"command": "ls | head -1"}, True, "broken.py"),
        ("terminal", {"command": "true"}, True, "ok"),
        ("lint", {}, True, "broken.py:1:"),  # ruff's words where the host has one, else our own
        ("lint", {"glob": "src/**"}, True, "src/shop/cart.py:10:"),
        ("lint", {"glob": "src/shop/mail.py"}, True, "no problems"),
        ("keyword_search", {"query": "total price of items"}, True, "src/shop/cart.py\n9:def grand_total(cart):"),
        ("keyword_search", {"query": "mails"}, True, "src/shop/mail.py\n1:def send_mail"),
        ("keyword_search", {"query": "zebra"}, True, "nothing found"),
        ("search", {"query": "class Cart"}, True, "src/shop/cart.py\n1:class Cart:\n2:    def __init__"),
        ("search", {"query": "("}, False, "bad pattern"),
        ("run_tests", {"path": "nope.py"}, True, "error nope.py"),
        ("finish", {"message": "bye"}, True, "done"),
    ],
)
async def test_each_tool(fresh: Fresh, shop: Made, name: str, arguments: dict[str, str], ok: bool, says: str) -> None:
    result = await Toolbox(tuple(schemas.BY_NAME)).run(
        ToolCall(id="0", name=name, arguments=arguments), await fresh(shop.task.files), shop.task
    )
    assert says in result.output and result.ok is ok


async def test_hostile_arguments_are_answered(fresh: Fresh, shop: Made) -> None:
    """Any argument that a policy writes comes back as text; nothing but SandboxLost may escape a tool."""
    sandbox, box = await fresh(shop.task.files), Toolbox(tuple(schemas.BY_NAME))
    nasty = [
        "",
        "\0",
        "\ufffd",
        "a\nb",
        "../../etc/passwd",
        "/etc/passwd",
        "[",
        "(a+)+$",
        "**/**",
        "x" * 5000,
        "%s{}",
        "-1",
    ]
    numbers = itertools.count()
    for tool in schemas.TABLE:
        names = [p.name for p in (*tool.attributes, *([tool.body] if tool.body else []))]
        for value in nasty:
            call = ToolCall(id=str(next(numbers)), name=tool.name, arguments=dict.fromkeys(names, value))
            result = await box.run(call, sandbox, shop.task)
            assert "root:" not in result.output and len(result.output) < 4200
            if names and value in ("\0", "../../etc/passwd") and "path" in names:
                assert not result.ok or "error" in result.output


async def test_details_bring_the_messages(fresh: Fresh, shop: Made) -> None:
    call = ToolCall(id="0", name="run_tests")
    sandbox = await fresh(shop.task.files)
    assert (await Toolbox(tuple(schemas.BY_NAME)).run(call, sandbox, shop.task)).output == "failed test_bad\n1 passed"
    full = (await Toolbox(details=True).run(call, sandbox, shop.task, "again")).output
    assert "one is not two" in full and full.endswith("1 passed")


async def test_every_known_tool_is_in_the_table() -> None:
    offered = ["keyword_search" if name == "semantic_search" else name for name in task_messages.DEFAULT_TOOLS]
    assert [name for name in offered if name in schemas.BY_NAME] == list(schemas.BY_NAME)
    assert set(offered) - set(schemas.BY_NAME) == {"edit", "terminal_session", "todo"}
