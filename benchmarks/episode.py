"""Measures the cost of one episode in real microVMs, judge included: CPU time of the QEMU processes and of this driver.

    python -m benchmarks.episode [--groups 6] [--alone 6] [--plain 3]

Episode: acquire with five files, search, two reads, tests (one fails), an edit, tests (all pass), pull of the tree,
release. Judge: a fresh clone, repository and diff and hidden tests in its first frame, one run, release. `group` puts
eight of them into one VM and their eight verdicts into another; `episode` gives every sandbox a VM of its own.

`plain` is the baseline in the same clones: a VM for every sandbox, and every step a program that is started in it (cat,
grep, sed, python, tar), as in sandboxes that can only run commands.
"""

import argparse
import asyncio
import io
import resource
import statistics
import tarfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import uvloop

from benchmarks.conditions import at_most, cannot_run, finish
from headrace.config import Environment
from headrace.messages.sandbox import (
    Acquire,
    CheckIntegrity,
    Exec,
    GroupKey,
    Isolation,
    PullTree,
    ReadFile,
    ReplaceLines,
    Role,
    RunTests,
    Search,
)
from headrace.messages.tasks import TestPlan
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox

FILES = {
    "README.md": b"# tiny\n\nSmall helpers.\n",
    "tiny/__init__.py": b"",
    "tiny/calc.py": b"def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    "tiny/text.py": b"def shout(text):\n    return text.upper() + '!'\n",
    "test_visible.py": (
        b"from tiny.calc import add, double\nfrom tiny.text import shout\n\n\n"
        b"def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_double():\n    assert double(4) == 8\n\n\n"
        b"def test_shout():\n    assert shout('a') == 'A!'\n"
    ),
}
HIDDEN = {
    "test_hidden.py": (
        b"from tiny.calc import add, double\n\n\ndef test_add():\n    assert add(7, -3) == 4\n\n\n"
        b"def test_zero():\n    assert add(0, 0) == 0\n\n\ndef test_double():\n    assert double(add(1, 1)) == 4\n"
    )
}
GROUP = 8


class Cost(NamedTuple):
    """Milliseconds per episode."""

    cpu: float
    driver: float
    wall: float


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(round(statistics.median(column), 1) for column in zip(*costs, strict=True)))


def _request(group: str, slot: int, role: Role, isolation: Isolation, files: dict[str, bytes]) -> Acquire:
    return Acquire(
        run="bench",
        lane="train",
        role=role,
        group=group,
        slot=slot,
        attempt=0,
        isolation=isolation,
        files=files,
    )


async def _episode(host: Host, group: str, slot: int, isolation: Isolation) -> dict[str, bytes]:
    """The agent's part; returns the diff."""
    sandbox = await host.acquire(_request(group, slot, "rollout", isolation, FILES))
    plan = TestPlan(paths=("test_visible.py",))
    matches = await sandbox.call(Search(pattern="def add"))
    assert matches.stdout == "tiny/calc.py:1:def add(a, b):", matches
    await asyncio.gather(sandbox.call(ReadFile(path="tiny/calc.py")), sandbox.call(ReadFile(path="test_visible.py")))
    before = await sandbox.call(RunTests(plan=plan))
    assert [test.outcome for test in before.tests] == ["failed", "passed", "passed"], before
    await sandbox.call(ReplaceLines(path="tiny/calc.py", first=2, last=2, text="    return a + b\n"))
    after = await sandbox.call(RunTests(plan=plan))
    assert after.ok, after
    tree = await sandbox.call(PullTree())
    host.release(sandbox.id)
    return {path: data for path, data in tree.files.items() if FILES.get(path) != data}


async def _judge(host: Host, group: str, slot: int, isolation: Isolation, diff: dict[str, bytes]) -> None:
    sandbox = await host.acquire(_request(group, slot, "judge", isolation, FILES | diff | HIDDEN))
    verdict = await sandbox.call(RunTests(plan=TestPlan(paths=("test_hidden.py",))))
    assert verdict.ok and len(verdict.tests) == 3, verdict
    assert not (await sandbox.call(CheckIntegrity())).tampered
    host.release(sandbox.id)


RUN = """
import sys
sys.path.insert(0, ".")
names = vars(__import__(sys.argv[1]))
failed = 0
for name in [name for name in names if name.startswith("test_")]:
    try:
        names[name]()
    except AssertionError:
        failed += 1
        print(name, "failed")
sys.exit(failed)
"""


async def _plainly(host: Host, name: str) -> None:
    """An episode and its verdict, with commands alone."""

    async def run(box: VmSandbox, *argv: str, code: int = 0, stdin: bytes = b"") -> bytes:
        done = await box.call(Exec(argv=argv, stdin=stdin, timeout_s=60.0))
        assert done.code == code, done
        return done.stdout.encode()

    async def push(box: VmSandbox, files: dict[str, bytes]) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        await run(box, "tar", "x", stdin=archive.getvalue())

    agent = await host.acquire(_request(name, 0, "rollout", "episode", {}))
    await push(agent, FILES)
    assert await run(agent, "grep", "-rn", "def add", ".") == b"./tiny/calc.py:1:def add(a, b):\n"
    await asyncio.gather(run(agent, "cat", "tiny/calc.py"), run(agent, "cat", "test_visible.py"))
    await run(agent, "python3", "-c", RUN, "test_visible", code=1)
    await run(agent, "sed", "-i", "2s/-/+/", "tiny/calc.py")
    await run(agent, "python3", "-c", RUN, "test_visible")
    after = {path: await run(agent, "cat", path) for path in ("tiny/calc.py", "tiny/text.py", "test_visible.py")}
    host.release(agent.id)
    judge = await host.acquire(_request(name, 0, "judge", "episode", {}))
    await push(judge, FILES | {"tiny/calc.py": after["tiny/calc.py"]} | HIDDEN)
    await run(judge, "python3", "-c", RUN, "test_hidden")
    host.release(judge.id)


async def _round(host: Host, name: str, isolation: Isolation, size: int) -> None:
    """A group: its episodes interleaved, then its verdicts."""
    diffs = await asyncio.gather(*(_episode(host, name, slot, isolation) for slot in range(size)))
    host.release_group(GroupKey("bench", "train", "rollout", name))
    await asyncio.gather(*(_judge(host, name, slot, isolation, diff) for slot, diff in enumerate(diffs)))
    host.release_group(GroupKey("bench", "train", "judge", name))


async def measure(environment: Environment, isolation: Isolation | None, rounds: int, size: int) -> Cost:
    """The cost per episode of all clones from start to end, and of this process. isolation None: the plain design."""
    host = await Host.open(environment)
    assert host.backend == "qemu"

    async def one(name: str) -> None:
        await (_round(host, name, isolation, size) if isolation else _plainly(host, name))

    await one("warm")
    await host.settle()
    before, driver_before, started = host.usage()["vm_cpu_ms"], time.process_time(), time.perf_counter()
    for number in range(rounds):
        await one(f"g{number}")
    await host.settle()
    wall = time.perf_counter() - started
    clones, driver = host.usage()["vm_cpu_ms"] - before, (time.process_time() - driver_before) * 1000
    await host.close()
    return Cost(*(value / (rounds * size) for value in (clones + driver, driver, wall * 1000)))


def main() -> None:
    """Measure both isolations."""
    parser = argparse.ArgumentParser(prog="benchmarks.episode", description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=6, help="groups of eight per repeat")
    parser.add_argument("--alone", type=int, default=6, help="episodes with a VM per sandbox, per repeat")
    parser.add_argument("--plain", type=int, default=3, help="episodes of the straightforward design, per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    environment = Environment(warm_most=1)  # clones that are kept ready after a burst are not part of an episode's cost
    try:
        costs: dict[str, list[Cost]] = {"group": [], "alone": [], "plain": []}
        for _ in range(arguments.repeats):  # alternately, so that other load of the machine affects all three
            costs["group"].append(uvloop.run(measure(environment, "group", arguments.groups, GROUP)))
            costs["alone"].append(uvloop.run(measure(environment, "episode", arguments.alone, 1)))
            costs["plain"].append(uvloop.run(measure(environment, None, arguments.plain, 1)))
        facts = uvloop.run(_facts(environment))
    except VmhostError as error:
        cannot_run(str(error))
    group, single, plain = (_median(cost) for cost in costs.values())
    figures = {
        "group_cpu_ms_per_episode": group.cpu,
        "group_driver_cpu_ms_per_episode": group.driver,
        "group_wall_ms_per_episode": group.wall,
        "alone_cpu_ms_per_episode": single.cpu,
        "alone_driver_cpu_ms_per_episode": single.driver,
        "alone_wall_ms_per_episode": single.wall,
        "plain_cpu_ms_per_episode": plain.cpu,
        "plain_wall_ms_per_episode": plain.wall,
        "alone_over_group_ratio": round(single.cpu / group.cpu, 2),
        "plain_over_group_ratio": round(plain.cpu / group.cpu, 2),
        "plain_over_alone_ratio": round(plain.cpu / single.cpu, 2),
        "episodes_per_group": GROUP,
        "driver_max_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        **{f"vm_{name}": value for name, value in facts.items()},
    }
    targets = {
        "group_cpu_ms_per_episode": at_most(group.cpu, 75.0),
        "alone_cpu_ms_per_episode": at_most(single.cpu, 320.0),
    }
    finish(figures, targets, "headrace")


async def _facts(environment: Environment) -> dict[str, object]:
    host = await Host.open(environment)
    await host.close()
    return host.facts()


if __name__ == "__main__":
    main()
