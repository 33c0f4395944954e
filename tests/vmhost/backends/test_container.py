"""A container attacks the host, whose kernel it shares: as root of its image it reaches and leaves nothing."""

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, OpResult
from headrace.vmhost import cgroups
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import base, imported
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.archives import docker_save, file, folder, member
from tests.support.hosts import CACHE
from tests.support.patience import PATIENCE_S
from tests.support.pids import running
from tests.support.programs import programs
from tests.support.syscalls import program

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.timeout(600)]
IMAGE = "attacker"
EPERM, ENOSYS = 1, 38
NEWUSER, NEWNS, NEWNET, SIGCHLD = 0x10000000, 0x20000, 0x40000000, 17
CALLS = {
    "user_namespace": (56, NEWUSER | SIGCHLD),
    "user_and_net_namespace": (56, NEWUSER | NEWNS | NEWNET | SIGCHLD),
    "mount_namespace": (56, NEWNS | SIGCHLD),
    "clone3": (435, 0, 0),
    "unshare": (272, NEWUSER),
    "setns": (308, 3, 0),
    "vsock": (41, 40, 1, 0),
    "syslog": (103, 3, 0, 0),
    "keyctl": (250, 0, 0xFFFFFFFD, 1),
    "bpf": (321, 0, 0, 0),
    "io_uring": (425, 1, 0),
    "userfaultfd": (323, 0),
    "perf_event_open": (298, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "sethostname": (170, 0x400000, 1),
    "reboot": (169, 0, 0, 0),
}
WORKS = {"fork": (56, SIGCHLD), "unix_socket": (41, 1, 1, 0), "tcp_socket": (41, 2, 1, 0)}
DEVICES = {"memory": (1, 1), "disk": (254, 0), "loop": (7, 0)}


@pytest.fixture(scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    environment = Environment(backend="container", cache_dir=CACHE, warm=0)
    await asyncio.to_thread(base.ensure, environment)
    nodes = [
        member(f"node-{name}", kind, devmajor=major, devminor=minor, mode=0o666)
        for name, (major, minor) in DEVICES.items()
        for kind in (tarfile.CHRTYPE if major == 1 else tarfile.BLKTYPE,)
    ]
    layer = [
        *programs("cat", "find", "id", "ls", "readlink", "setsid", "sleep"),
        *(file(f"bin/{name}", program(*call), mode=0o755) for name, call in (CALLS | WORKS).items()),
        file("bin/root", programs("id")[-2][1], mode=0o6755),
        folder("work"),
        *nodes,
    ]
    place = tmp_path_factory.mktemp("image") / "image.tar"
    await asyncio.to_thread(imported.take, Path(CACHE), docker_save(place, [layer], WorkingDir="/work"), IMAGE)
    opened = await Host.open(environment)
    yield opened
    await opened.close()


async def acquired(host: Host, number: int = 0) -> VmSandbox:
    fields = {"run": "r", "lane": "train", "role": "rollout", "group": f"g{number}", "slot": 0, "attempt": 0}
    return await host.acquire(Acquire(**fields, isolation="episode", template=IMAGE))  # type: ignore[arg-type]


async def shell(sandbox: VmSandbox, script: str) -> OpResult:
    done = await sandbox.call(Exec(argv=("sh", "-c", script), timeout_s=60.0))
    assert done.ok, done
    return done


@pytest.fixture
async def sandbox(host: Host) -> AsyncIterator[VmSandbox]:
    taken = await acquired(host)
    yield taken
    host.release(taken.id)
    await host.settle()


async def test_no_system_call_leads_out_of_its_namespaces(sandbox: VmSandbox) -> None:
    script = "; ".join(f"/bin/{name}; echo {name} $?" for name in (*CALLS, *WORKS))
    codes = dict(line.split() for line in (await shell(sandbox, script)).stdout.splitlines())
    assert {name: code for name in CALLS if int(code := codes[name]) not in (EPERM, ENOSYS)} == {}
    assert {name: codes[name] for name in WORKS} == dict.fromkeys(WORKS, "0")


async def test_root_changes_no_setting_of_the_kernel(sandbox: VmSandbox) -> None:
    assert (await shell(sandbox, "id -u")).stdout == "0\n"
    settings = "acpi asound bus driver fs irq mtrr pressure scsi sys"
    folders = " ".join(f"/proc/{name}" for name in settings.split() if os.path.exists(f"/proc/{name}"))
    seen = await shell(sandbox, f"for f in $(find {folders} /sys -type f); do [ -w $f ] && echo $f; done; echo .")
    assert seen.stdout == ".\n"
    same = "v=$(cat /proc/irq/default_smp_affinity) && echo $v > /proc/irq/default_smp_affinity && echo written"
    assert "written" not in (await shell(sandbox, f"({same}); echo .")).stdout
    for name in ("kcore", "keys", "kmsg", "kpagecount", "kpageflags", "sysrq-trigger", "timer_list", "vmallocinfo"):
        read = await shell(sandbox, f"[ ! -e /proc/{name} ] || cat /proc/{name}; echo .")
        assert read.stdout == ".\n", name


async def test_what_an_image_holds_gives_no_rights(sandbox: VmSandbox) -> None:
    for name in DEVICES:
        assert (await shell(sandbox, f"cat /node-{name} > /dev/null && echo read; echo .")).stdout == ".\n", name
    capabilities = (await shell(sandbox, "cat /proc/self/status")).stdout
    assert "CapEff:\t00000000000004fb\n" in capabilities
    assert "NoNewPrivs:\t1\n" in capabilities


async def test_its_first_process_shows_nothing_of_the_host(sandbox: VmSandbox) -> None:
    """It is a process of headrace: its memory, environment and root folder were the host's."""
    for name in ("environ", "maps", "mem", "auxv"):
        assert (await shell(sandbox, f"cat /proc/1/{name} && echo read; echo .")).stdout == ".\n", name
    links = await shell(sandbox, "for n in root cwd exe fd/3 fd/4; do readlink /proc/1/$n; done; ls /proc/self/fd")
    assert links.stdout.split() == ["0", "1", "2", "3"], "descriptor 3 is the folder that ls reads"


async def test_a_neighbour_has_namespaces_of_its_own(host: Host, sandbox: VmSandbox) -> None:
    other = await acquired(host, 1)
    script = "for n in mnt pid net ipc uts; do readlink /proc/self/ns/$n; done"
    namespaces = [set((await shell(box, script)).stdout.split()) for box in (sandbox, other)]
    ours = {os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "net", "ipc", "uts")}
    assert [len(part) for part in (*namespaces, ours)] == [5, 5, 5]
    assert not namespaces[0] & namespaces[1]
    assert not (namespaces[0] | namespaces[1]) & ours
    await shell(sandbox, "echo secret > /tmp/left; echo secret > /dev/shm/left; echo secret > /work/left")
    assert (await shell(other, "cat /tmp/left /dev/shm/left /work/left; echo .")).stdout == ".\n"
    host.release(other.id)


def backing(path: Path) -> str:
    """The file behind a loop device; empty once it is detached."""
    try:
        return path.read_text()
    except OSError:
        return ""


async def test_nothing_of_it_outlives_its_release(host: Host) -> None:
    sandbox = await acquired(host, 2)
    one, two = (f"86399.{os.getpid()}{digit}" for digit in "12")
    left = f"setsid sleep {one} > /dev/null 2>&1 & (setsid sh -c 'while :; do sleep {two}; done' &); sleep 0.2; echo ."
    assert (await shell(sandbox, left)).stdout == ".\n"
    assert len(running(one)) == 1
    host.release(sandbox.id)
    await host.settle()
    assert not [*running(one), *running(two)]
    assert "headrace-container" not in Path("/proc/mounts").read_text()
    async with asyncio.timeout(PATIENCE_S):  # another process of this machine may have containers of its own
        while [path for path in Path("/sys/block").glob("loop*/loop/backing_file") if CACHE in backing(path)]:
            await asyncio.sleep(0.05)
    places = cgroups.places()
    assert places is not None
    assert [left for place in places.folders for left in place.glob(f"headrace-{os.getpid()}/container-*")] == []
