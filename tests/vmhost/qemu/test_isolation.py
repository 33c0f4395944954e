"""Slots of one machine attack each other and the machine, and reach neither."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.messages.sandbox import (
    Exec,
    GroupKey,
    ListFiles,
    ReadFile,
    RunTests,
    StartJob,
    WriteFiles,
)
from headrace.messages.tasks import TestPlan
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.hosts import ask, clone_of, environment
from tests.support.listening import listening

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(environment())
    yield opened
    await opened.close()


@pytest.fixture
async def group(host: Host) -> AsyncIterator[list[VmSandbox]]:
    """Three sandboxes of one machine."""
    name = secrets.token_hex(4)
    taken = [await host.acquire(ask(slot, group=name)) for slot in range(3)]
    yield taken
    for sandbox in taken:
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", name))


async def test_slots_do_not_see_each_other(group: list[VmSandbox]) -> None:
    one, two, _ = group
    await one.call(WriteFiles(files={"secret": b"1", "../tmp/x": b""}))
    await one.call(Exec(argv=("sh", "-c", "echo 1 > /tmp/secret; sleep 300 & nc -l -p 999 &")))
    seen = await two.call(Exec(argv=("sh", "-c", "ls /workspace /tmp; ps | grep -c slee[p]; hostname")))
    assert seen.stdout == "/tmp:\n\n/workspace:\na.txt\n0\nsandbox\n"


ATTACKS = (
    "kill -9 1; kill -9 -1",
    "echo x > /opt/headrace/guest/keeper.py",
    "echo x > /usr/lib/python3.11/os.py",
    "mount -t tmpfs none /opt",
    "mount -o remount,rw /",
    "echo x > /dev/kmsg",
    "echo x > /proc/1/mem",
    "echo 0 > /proc/sys/kernel/dmesg_restrict",
    "unshare -U true",
    "cat /proc/1/environ",
    "ls /proc/1/fd",
    "mknod /tmp/port c 240 1",
    "ls /dev/vport*",
    "chown 0 a.txt",
    "su -c true",
)


async def test_attacks_from_inside_a_slot_fail(group: list[VmSandbox]) -> None:
    for attack in ATTACKS:
        script = f"({attack}) > /dev/null 2>&1 && echo done"
        failed = await group[0].call(Exec(argv=("sh", "-c", script), timeout_s=20.0))
        assert "done" not in failed.stdout, attack
        for sandbox in group:
            assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"one\n", attack


async def test_a_keeper_survives_its_tools_and_a_fork_bomb_its_siblings(group: list[VmSandbox]) -> None:
    one, two, _ = group
    bomb = Exec(argv=("sh", "-c", "f() { f | f & }; f; sleep 1"), timeout_s=1.0)
    task = asyncio.create_task(one.call(bomb))
    assert (await two.call(Exec(argv=("echo", "fine")))).stdout == "fine\n"
    await task
    assert (await two.call(ReadFile(path="a.txt"))).data == b"one\n"


REACHES = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
calls = {"add_key": (248, b"user", b"a", b"b", 1, -3), "keyctl": (250, 0, -3, 1), "unshare": (272, 0x10000000)}
calls |= {"bpf": (321, 0, 0, 0), "io_uring": (425, 1, 0), "userfaultfd": (323, 0), "x32": (0x40000000 + 39,)}
calls |= {"vsock": (41, 40, 1, 0), "syslog": (103, 3, 0, 0), "clone3": (435, 0, 0)}
calls |= {f"namespace {flag:#x}": (56, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000, 0x50000000)}
print(*(name for name, call in calls.items() if libc.syscall(*call) >= 0 or ctypes.get_errno() not in (1, 38)))
here = socket.socket(socket.AF_UNIX)
try:
    here.connect(chr(0) + "hr-test")
    print("abstract socket")
except ConnectionRefusedError:
    print("getpid works" if os.getpid() else "")
"""
"""Attacks that namespaces alone leave open, tried from inside."""


async def test_what_namespaces_do_not_separate_is_refused(group: list[VmSandbox]) -> None:
    listens = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'hr-test'); s.listen(); "
    waits = "until grep -q hr-test /proc/net/unix; do sleep 0.05; done"
    one, two, _ = group
    started = Exec(argv=("sh", "-c", f'python3 -c "{listens}time.sleep(60)" & {waits}'))
    assert (await two.call(started)).ok
    reached = await one.call(Exec(argv=("python3", "-c", REACHES)))
    assert reached.stdout == "\ngetpid works\n", reached


LEAVES = """
for n in 1 2 3 4; do (setsid sh -c 'trap "" TERM HUP; sleep 86400 & sleep 86400' > /dev/null 2>&1 &); done
echo hidden tests > /tmp/left; echo hidden tests > /dev/shm/left; mkfifo /tmp/pipe; (cat /tmp/pipe &)
python3 -c "import mmap; mmap.mmap(-1, 1 << 20)"
until [ $(ps | grep -c 'sleep 8640[0]') -ge 8 ]; do sleep 0.1; done
"""


async def test_nothing_of_a_released_judge_is_left_for_the_next_one(host: Host) -> None:
    """Verdicts of a group share a machine: what a candidate leaves there must not reach the next sandbox."""
    name = secrets.token_hex(4)
    one, two = [await host.acquire(ask(slot, group=name, role="judge")) for slot in range(2)]
    threads = Exec(argv=("sh", "-c", "cut -d/ -f2 /proc/loadavg | cut -d' ' -f1"))  # of the whole machine
    before = int((await two.call(threads)).stdout)
    assert (await one.call(Exec(argv=("sh", "-c", LEAVES), timeout_s=60.0))).ok
    assert int((await two.call(threads)).stdout) >= before + 8
    host.release(one.id)
    async with asyncio.timeout(60):
        while int((await two.call(threads)).stdout) > before:
            await asyncio.sleep(0.05)
    three = await host.acquire(ask(2, group=name, role="judge"))
    assert host.machine(three.id) is host.machine(two.id)
    look = "cat /tmp/left /dev/shm/left; ls /tmp /dev/shm; ps | grep -c slee[p]"
    assert (await three.call(Exec(argv=("sh", "-c", look)))).stdout.split() == ["/dev/shm:", "/tmp:", "0"]
    agent = await host.acquire(ask(0, group=name, role="rollout"))
    assert host.machine(agent.id) is not host.machine(two.id), "agents and judges never share a machine"
    for role in ("judge", "rollout"):
        host.release_group(GroupKey("r1", "train", role, name))
    for sandbox in (two, three, agent):
        host.release(sandbox.id)


SIGNALS = """
import ctypes, fcntl, os, sys, time
libc, shared = ctypes.CDLL(None), "/usr/lib/python3.11/os.py"
held = open(shared)
fcntl.flock(held, fcntl.LOCK_EX)
watch = libc.inotify_init1(os.O_NONBLOCK)
libc.inotify_add_watch(watch, b"/usr/lib/python3.11", 0xFFF)
if os.fork() == 0:
    open("ready", "w")
    while not os.path.exists("look"):
        time.sleep(0.01)
    try:
        print(len(os.read(watch, 65536)), file=open("seen.new", "w"))
    except BlockingIOError:
        print("nothing", file=open("seen.new", "w"))
    os.rename("seen.new", "seen")
    time.sleep(60)
"""
"""Holds a lock on a file of the root that every slot may read, and watches its folder."""
NOTICES = """
import fcntl
shared = open("/usr/lib/python3.11/os.py")
fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("free", open("/proc/locks").read().count("FLOCK"))
"""


async def test_slots_do_not_signal_each_other_through_files_of_the_root(group: list[VmSandbox]) -> None:
    one, two, _ = group
    holds = await one.call(StartJob(argv=("python3", "-c", SIGNALS)))
    assert holds.ok
    assert (await one.call(Exec(argv=("sh", "-c", "until [ -e ready ]; do sleep 0.05; done")))).ok
    noticed = await two.call(Exec(argv=("python3", "-c", NOTICES)))
    assert noticed.stdout == "free 1\n", noticed
    look = "touch look; until [ -e seen ]; do sleep 0.05; done; cat seen"
    assert (await one.call(Exec(argv=("sh", "-c", look)))).stdout == "nothing\n"


@pytest.mark.slow
async def test_a_slot_that_takes_all_memory_is_killed_alone(group: list[VmSandbox]) -> None:
    one, two, _ = group
    hog = "kept = [bytearray(1 << 20) for _ in range(1 << 14)]"
    done, tests = await asyncio.gather(
        one.call(Exec(argv=("python3", "-c", hog))),
        two.call(WriteFiles(files={"test_a.py": b"def test_a():\n    assert sum(range(10)) == 45\n"})),
    )
    assert done.code == -9, done
    assert tests.ok and (await two.call(RunTests(plan=TestPlan(paths=("test_a.py",))))).ok
    assert (await one.call(ReadFile(path="a.txt"))).data == b"one\n"
    groups = [(await box.call(Exec(argv=("cat", "/proc/self/cgroup")))).stdout for box in (one, two)]
    assert groups[0] != groups[1] and all(text.startswith("0::/") and len(text) > 5 for text in groups), groups


async def test_a_full_workspace_is_an_error_of_its_owner(group: list[VmSandbox]) -> None:
    one, two, _ = group
    full = await one.call(WriteFiles(files={"big": b"x" * (40 << 20)}))
    assert not full.ok and "No space left" in full.error
    assert (await two.call(WriteFiles(files={"small": b"x"}))).ok


async def test_output_without_end_is_cut_and_ended(group: list[VmSandbox]) -> None:
    # Three seconds: on a busy host a new process in an emulated machine may print nothing within one.
    endless = await group[0].call(Exec(argv=("yes",), timeout_s=3.0, output_cap=4096))
    assert endless.timed_out and endless.truncated and len(endless.stdout) == 4096
    assert (await group[0].call(ListFiles())).stdout == "a.txt"


async def test_a_machine_listens_nowhere(host: Host, group: list[VmSandbox]) -> None:
    """Its monitor and its channels are socket pairs that it inherits, and it has no network card."""
    pids = {clone_of(host, sandbox).pid for sandbox in group}
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(b"qemu" in line and b"hostfwd" not in line and b"-netdev" not in line for line in words)
    assert listening(pids) == set()
