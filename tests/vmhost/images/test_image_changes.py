"""Changes of an image's programs are read from outside, whatever git says, and made again in a fresh clone."""

from collections.abc import AsyncIterator

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, ApplyChanges, Change, CheckIntegrity, Exec, OpResult, PullChanges
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, packages
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu import probe
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.timeout(600)]

CACHE = ROOT / ".cache" / "headrace"
APPLETS = (
    "sh",
    "cat",
    "ls",
    "mv",
    "rm",
    "mkdir",
    "chmod",
    "ln",
    "touch",
    "printf",
    "dd",
    "stat",
    "find",
    "sort",
    "sed",
)


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    environment = Environment(backend="qemu", cache_dir=str(CACHE), warm=0)
    opened = await Host.open(environment)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def image(host: Host, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small image with a repository in /testbed, on two segments."""
    binary = probe._busybox(packages.folder(CACHE))
    owner = {"uid": 1000, "gid": 100}
    below: Members = [
        folder("bin"),
        file("bin/busybox", binary, mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in APPLETS),
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\ndev:x:1000:100::/home/dev:/bin/sh\n"),
        folder("testbed", **owner),
        folder("testbed/.git", **owner),
        file("testbed/.git/HEAD", b"ref: x\n", **owner),
        folder("testbed/pkg", **owner),
        *(file(f"testbed/pkg/{n}.py", b"n = %d\n" % n, **owner) for n in range(4)),
        folder("testbed/old", **owner),
        file("testbed/old/a", b"a", **owner),
        folder("testbed/moved", **owner),
        file("testbed/moved/m", b"m" * 5000, **owner),
        folder("opt/lib", **owner),
        file("opt/lib/site.py", b"site = 1\n", **owner),
    ]
    above: Members = [file("testbed/run.sh", b"#!/bin/sh\necho ran\n", mode=0o644, **owner)]
    folder_ = tmp_path_factory.mktemp("image")
    settings = {"User": "dev", "WorkingDir": "/testbed"}
    imported.take(CACHE, docker_save(folder_ / "b.tar", [below], ["changes-below:1"], **settings), "changes-below")
    imported.take(CACHE, docker_save(folder_ / "a.tar", [below, above], ["changes:1"], **settings), "changes")
    return "changes"


def ask(name: str, group: str, **changes: object) -> Acquire:
    fields: dict[str, object] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "episode"}
    return Acquire(group=group, slot=0, template=name, **(fields | changes))  # type: ignore[arg-type]


async def sh(sandbox: VmSandbox, script: str) -> OpResult:
    return await sandbox.call(Exec(argv=("sh", "-c", script), timeout_s=60.0))


SHOWN = """find pkg run.sh new renamed /opt/lib fresh -type f | sort | while read f
do stat -c '%n %a' $f; sed 's/^/  /' $f; done
ls -l link | sed 's/.*link/link/'; ls old moved pkg/3.py 2>&1; ls fresh"""


async def test_changes_are_read_from_the_writable_layer_and_made_again(host: Host, image: str) -> None:
    box = await host.acquire(ask(image, "work"))
    done = await sh(
        box,
        """set -e
        printf 'n = 9\\n' > pkg/0.py; touch pkg/1.py; printf 'n = 2\\n' > pkg/2.py; rm pkg/3.py
        chmod 755 run.sh; rm -r old; mkdir new; dd if=/dev/urandom of=new/bin bs=1000 count=3 2> /dev/null
        ln -s pkg/0.py link; mv moved renamed; printf 'site = 2\\n' > /opt/lib/site.py
        rm -r .git; mkdir .git fresh __pycache__; printf x > .git/y
        printf 1 > /tmp/scratch; printf 1 > __pycache__/z
        rm -r pkg; mkdir pkg; printf 'n = 9\\n' > pkg/0.py""",
    )
    assert done.ok, done
    pulled = await box.call(PullChanges())
    assert pulled.ok, pulled.error
    kinds = {(change.path, change.kind) for change in pulled.changes}
    assert kinds == {
        *((name, "gone") for name in ("old", "moved", "pkg")),
        *((name, "folder") for name in ("new", "renamed", "fresh", "pkg")),
        *((name, "file") for name in ("new/bin", "renamed/m", "pkg/0.py", "run.sh", "/opt/lib/site.py")),
        ("link", "link"),
    }
    modes = {change.path: change.mode for change in pulled.changes if change.kind == "file"}
    assert modes["run.sh"] == 0o755 and len(pulled.files["new/bin"]) == 3000
    assert pulled.originals["run.sh"].startswith(b"#!/bin/sh")
    assert pulled.originals["/opt/lib/site.py"] == b"site = 1\n"
    fresh = await host.acquire(ask(image, "judge"))
    assert (await fresh.call(PullChanges())).changes == ()
    applied = await fresh.call(ApplyChanges(changes=pulled.changes, files=pulled.files))
    assert applied.ok, applied.error
    assert (await sh(fresh, SHOWN)).stdout == (await sh(box, SHOWN)).stdout
    again = await fresh.call(PullChanges())
    assert (again.changes, again.files) == (pulled.changes, pulled.files)
    for taken in (box, fresh):
        checked = await taken.call(CheckIntegrity(thorough=True))
        assert checked.ok and checked.tampered == ()
        host.release(taken.id)


async def test_changes_have_a_limit_and_need_an_image(host: Host, image: str) -> None:
    box = await host.acquire(ask(image, "limits", workdir="/opt/lib"))
    assert (await sh(box, "dd if=/dev/zero of=big bs=1000 count=200 2> /dev/null; printf x > site.py")).ok
    whole = await box.call(PullChanges())
    assert sorted(change.path for change in whole.changes) == ["big", "site.py"]
    cut = await box.call(PullChanges(limit=100_000))
    assert cut.ok and cut.truncated and cut.changes == ()
    outside = ApplyChanges(changes=(Change("/etc/passwd", "file", 0o644),), files={"/etc/passwd": b"x"})
    assert "/etc/passwd: Permission denied" in (await box.call(outside)).error, "changes are made as the image's user"
    upward = ApplyChanges(changes=(Change("../x", "gone"),), files={})
    assert "a path without .." in (await box.call(upward)).error
    host.release(box.id)
    light = await host.acquire(ask("light", "light"))
    refused = await light.call(PullChanges())
    assert not refused.ok and "is no container image" in refused.error
    host.release(light.id)
    with pytest.raises(VmhostError, match=r"no template 'docker\.io/library/absent:1'"):
        await host.acquire(ask("docker.io/library/absent:1", "absent"))


@pytest.mark.slow
async def test_an_image_forks(host: Host, image: str) -> None:
    box = await host.acquire(ask(image, "source"))
    assert (await sh(box, "printf changed > pkg/1.py")).ok
    (copy,) = await host.fork(box.id, [ask(image, "copy")])
    assert (await sh(copy, "cat pkg/1.py pkg/2.py")).stdout == "changedn = 2\n"
    (later,) = await host.fork(copy.id, [ask(image, "later")])
    assert (await sh(later, "cat pkg/1.py pkg/2.py")).stdout == "changedn = 2\n"
    assert [change.path for change in (await later.call(PullChanges())).changes] == ["pkg/1.py"]
    for taken in (box, copy, later):
        assert (await taken.call(CheckIntegrity())).tampered == ()
        host.release(taken.id)
