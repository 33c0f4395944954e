"""The tool search with ripgrep and without it: the same answers, and the sandbox's own search as the other way."""

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.config import Environment
from headrace.harness.tools.base import Workspace
from headrace.harness.tools.search import grep
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task, TaskRef
from headrace.vmhost.node.host import Host
from tests.support import hosts
from tests.support.records import of

pytestmark = pytest.mark.anyio

PACKAGES = Path("/var/cache/apt/archives")
"""Where building the guest image leaves the packages that it downloads."""
FILES = {
    "a.py": b"class A:\n    def mean(self, x):\n        return sum(x)\n\n\nMEAN = A().mean\n",
    "kit/b.py": b"def mean(x):\n    # the mean\n    return 0\n\n\ndef other():\n    return mean([1])\n",
    "kit/.hidden/c.txt": b"the mean of caf\xc3\xa9\n",
    "data.bin": b"mean\0mean\n",
    ".gitignore": b"kit/\n",
    "many.txt": b"row\n" * 50,
    "windows.txt": b"\xef\xbb\xbfmean\r\na\x0cb\rc mean\r\n",
    "a:1:b-2-c ": b"\nthe odd mean\n",
    "latin.txt": b"caf\xe9 mean\n",
    "utf16.txt": "first\na mean\n".encode("utf-16"),
    ".git/config": b"mean\n",
}
TASK = of(Task, ref=TaskRef("s", "t"), files=FILES, template="debian")


@pytest.fixture(scope="module")
def ripgrep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real ripgrep of this machine: installed, or from the package that the guest image is built from."""
    if program := shutil.which("rg"):
        return program
    packages = sorted(PACKAGES.glob("ripgrep_*.deb"))
    if not packages or not shutil.which("dpkg-deb"):
        pytest.skip("there is no ripgrep on this machine, and no package of it")
    folder = tmp_path_factory.mktemp("ripgrep")
    subprocess.run(["dpkg-deb", "-x", packages[-1], folder], check=True)
    return str(folder / "usr/bin/rg")


@pytest.fixture(scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    host = await Host.open(Environment(backend="process"))
    yield await host.acquire(hosts.ask(0, group="grep", files=FILES))
    await host.close()


QUERIES = [
    {"query": "mean"},
    {"query": r"def \w+\(x\)"},
    {"query": "mean", "glob": "*.py"},
    {"query": "mean", "glob": "kit/*.py"},
    {"query": "mean", "glob": "kit/**"},
    {"query": "mean$"},
    {"query": "^mean"},
    {"query": "odd mean"},
    {"query": "a mean"},
    {"query": "row"},
    {"query": "café"},
    {"query": "no such text"},
    {"query": "-c"},
    {"query": r"(?<=the )mean"},
    {"query": "mean("},
]


@pytest.mark.parametrize("arguments", QUERIES, ids=lambda each: "-".join(each.values()))
async def test_ripgrep_and_the_sandbox_s_own_search_answer_alike(
    sandbox: Sandbox, ripgrep: str, arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = msgspec.structs.replace(TASK, template="light")
    expected = await grep.TOOL.run(arguments, Workspace(sandbox, plain, f"plain {arguments}"))
    monkeypatch.setattr(grep, "_RIPGREP", (ripgrep, *grep._RIPGREP[1:]))
    with_ripgrep = Workspace(sandbox, TASK, f"rg {arguments}")
    answer = await grep.TOOL.run(arguments, with_ripgrep)
    assert answer == expected
    assert not with_ripgrep.memory, "ripgrep was there"


async def test_a_sandbox_without_ripgrep_is_asked_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grep, "_RIPGREP", ("no-such-ripgrep",))
    memory: dict[str, str] = {}
    answers = [await grep.TOOL.run({"query": "row"}, Workspace(sandbox, TASK, f"n{n}", memory=memory)) for n in (1, 2)]
    assert answers[0] == answers[1] and answers[0].output.startswith("many.txt\n1:row") and memory


@pytest.mark.vm
@pytest.mark.slow
async def test_the_debian_image_has_ripgrep() -> None:
    host = await Host.open(hosts.environment())
    try:
        machine = await host.acquire(hosts.ask(0, group="grep", template="debian", files=FILES))
        workspace = Workspace(machine, TASK, "0")
        answer = await grep.TOOL.run({"query": "the mean"}, workspace)
    finally:
        await host.close()
    assert answer.output == "kit/.hidden/c.txt\n1:the mean of café\nkit/b.py\n2:    # the mean" and not workspace.memory
