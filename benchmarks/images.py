"""Measures container images: storing, clones with an attached image, the diff, memory, and many images on one node.

    python -m benchmarks.images [--filler MIB] [--clones N] [--images N] [--shared N]

The image is made here: Debian's minimal system with Python, pytest and git, a git repository of 20,000 files in
/testbed, and random filler, 3 GiB in all. CPU time is that of the QEMU processes (`/proc/PID/task/*/schedstat`), from
their start: it is the figure, because wall times of a shared host are noisy. Clones of the image and of the light
template in memory alternate. A clone's figure ends with the first answer of its slot.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.conditions import arguments, at_most, cannot_run, finish
from headrace.config import Environment
from headrace.messages.sandbox import Acquire, ApplyChanges, CheckIntegrity, Exec, OpResult, PullChanges, ReadFile
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, packages
from headrace.vmhost.node.host import Host, VmSandbox

Figures = dict[str, Any]
PACKAGES = ("python3", "python3-pytest", "git", "ca-certificates")
FILES = 20_000
CHANGED = 70
TEST = b"def test_a():\n    assert 1 + 1 == 2\n\n\ndef test_b():\n    assert 'a' * 2 == 'aa'\n"


class Layers:
    """An OCI layout with several images over the same layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs" / "sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def layer(self, tar: Path) -> dict[str, Any]:
        """Add an uncompressed layer."""
        with tar.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = tar.stat().st_size
        tar.rename(self.folder / "blobs" / "sha256" / digest)
        return {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}

    def blob(self, value: Any, kind: str) -> dict[str, Any]:
        """Store a JSON document."""
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs" / "sha256" / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{kind}.v1+json",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    def image(self, layers: list[dict[str, Any]], workdir: str = "/testbed") -> Path:
        """Make an image of these layers the only one of the layout."""
        rootfs = {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}
        config = {"os": "linux", "architecture": "amd64", "config": {"WorkingDir": workdir}, "rootfs": rootfs}
        manifest = {"schemaVersion": 2, "config": self.blob(config, "config"), "layers": layers}
        index = {"schemaVersion": 2, "manifests": [self.blob(manifest, "manifest")]}
        (self.folder / "index.json").write_text(json.dumps(index))
        return self.folder


def repository(folder: Path) -> None:
    """A git repository of `FILES` files with one commit."""
    for number in range(FILES):
        path = folder / f"pkg{number % 100:02}" / f"module{number:05}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def value_{number}():\n    return {number}\n" * 8)
    (folder / "test_two.py").write_bytes(TEST)
    settings = ("user.name=a", "user.email=a@b", "gc.auto=0")  # git would collect garbage while the tree is packed
    git = ["git", *(word for setting in settings for word in ("-c", setting)), "-C", str(folder)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], check=True)


def tar_of(tree: Path, prefix: str, target: Path) -> Path:
    """A layer that holds a folder, owned by root."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname=prefix, filter=owned)
    return target


def base_layer(layout: Layers, work: Path) -> dict[str, Any]:
    """Debian's minimal system. VmhostError."""
    packages.download(work / "base.tar", PACKAGES)
    return layout.layer(work / "base.tar")


def large_image(layout: Layers, base: dict[str, Any], work: Path, filler_mib: int) -> Path:
    """The image of the benchmark."""
    tree = work / "testbed"
    repository(tree)
    filler = work / "filler"
    filler.mkdir()
    for number in range(16):
        with (filler / f"data{number}").open("wb") as out:
            for _ in range(filler_mib // 16):
                out.write(os.urandom(1 << 20))
    layers = [base, layout.layer(tar_of(tree, "testbed", work / "t.tar"))]
    layers.append(layout.layer(tar_of(filler, "opt/filler", work / "f.tar")))
    shutil.rmtree(tree)
    shutil.rmtree(filler)
    return layout.image(layers)


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, its threads included."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        total += int(task.read_text().split()[0])
    return total / 1e6


def median(values: list[float]) -> float:
    """Median, rounded to one digit."""
    return round(statistics.median(values), 1)


def request(template: str, slot: int, workdir: str = "") -> Acquire:
    """A sandbox with a machine of its own."""
    return Acquire(
        run="bench", lane="eval", role="rollout", group=f"b{slot}", slot=0, attempt=0, isolation="episode",
        template=template, workdir=workdir, lease_s=3600.0,
    )  # fmt: skip


class Bench:
    """One host, and the machines of its sandboxes."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._count = 0

    async def begin(self, template: str) -> VmSandbox:
        """A sandbox that has answered once."""
        self._count += 1
        sandbox = await self.host.acquire(request(template, self._count))
        await sandbox.call(ReadFile(path="absent"))
        return sandbox

    def pid(self, sandbox: VmSandbox) -> int:
        """CPU time of its QEMU."""
        return int(self.host.machine(sandbox.id).pid)  # type: ignore[union-attr]

    def anon_mb(self, sandbox: VmSandbox) -> float:
        """Anonymous memory of its QEMU."""
        return float(self.host.machine(sandbox.id).private_mb())  # type: ignore[union-attr]

    async def sh(self, sandbox: VmSandbox, script: str) -> tuple[OpResult, float]:
        """A command's result and its CPU-ms."""
        before = cpu_ms(self.pid(sandbox))
        done = await sandbox.call(Exec(argv=("sh", "-c", script), timeout_s=600.0))
        if not done.ok:
            raise VmhostError(f"the machine failed: {script[:60]}: {done.error}: {(done.stdout + done.stderr)[-300:]}")
        return done, cpu_ms(self.pid(sandbox)) - before


async def clones(bench: Bench, count: int) -> Figures:
    """Clones with their image and clones in memory, alternating; then all alive at once."""
    cpu: dict[str, list[float]] = {"large": [], "light": []}
    wall: dict[str, list[float]] = {"large": [], "light": []}
    host_ms: dict[str, list[float]] = {"large": [], "light": []}
    for _ in range(count):
        for name in cpu:
            started, before = time.perf_counter(), time.process_time()
            sandbox = await bench.begin(name)
            host_ms[name].append((time.process_time() - before) * 1000)
            wall[name].append((time.perf_counter() - started) * 1000)
            cpu[name].append(cpu_ms(bench.pid(sandbox)))
            bench.host.release(sandbox.id)
            await bench.host.settle()
    alive = [await bench.begin("large") for _ in range(12)]
    anon = [bench.anon_mb(sandbox) for sandbox in alive]
    for sandbox in alive:
        bench.host.release(sandbox.id)
    await bench.host.settle()
    return {
        "clone_attached_cpu_p50_ms": median(cpu["large"]),
        "clone_attached_first_cpu_ms": round(cpu["large"][0], 1),
        "clone_attached_host_cpu_p50_ms": median(host_ms["large"]),
        "clone_in_memory_host_cpu_p50_ms": median(host_ms["light"]),
        "clone_attached_wall_p50_ms": median(wall["large"]),
        "clone_in_memory_cpu_p50_ms": median(cpu["light"]),
        "clone_in_memory_wall_p50_ms": median(wall["light"]),
        "attached_over_in_memory_cpu_ratio": round(median(cpu["large"]) / median(cpu["light"]), 2),
        "twelve_clones_anon_max_mib": round(max(anon), 1),
    }


EDIT = """cd /testbed; i=0
while [ $i -lt 30 ]; do n=$(printf %05d $i); echo x >> pkg$(printf %02d $((i % 100)))/module$n.py; i=$((i+1)); done
i=100; while [ $i -lt 120 ]; do n=$(printf %05d $i); rm pkg$(printf %02d $((i % 100)))/module$n.py; i=$((i+1)); done
mkdir new; i=0; while [ $i -lt 15 ]; do head -c 2000 /dev/urandom > new/bin$i; i=$((i+1)); done
mv pkg50/module00050.py renamed.py; chmod 755 pkg60/module00060.py; ln -s renamed.py link"""


async def diffs(bench: Bench) -> Figures:
    """An episode of shell edits: the diff before and after git is used and removed, and the same in a fresh clone."""
    sandbox = await bench.begin("large")
    _, tests = await bench.sh(sandbox, "cd /testbed && python3 -m pytest -q -p no:cacheprovider test_two.py")
    await bench.sh(sandbox, EDIT)
    used = []
    for _ in range(3):
        before = cpu_ms(bench.pid(sandbox))
        pulled = await sandbox.call(PullChanges())
        used.append(cpu_ms(bench.pid(sandbox)) - before)
    # Without gc.auto=0, git collects garbage after the commit and writes into a folder that is being removed.
    git = "git -c gc.auto=0 -c safe.directory=/testbed -c user.name=a -c user.email=a@b"
    _, status = await bench.sh(sandbox, f"cd /testbed && {git} add -A && {git} commit -qm all")
    committed = await sandbox.call(PullChanges())
    await bench.sh(sandbox, "rm -rf /testbed/.git")
    removed = await sandbox.call(PullChanges())
    same = pulled.changes == committed.changes == removed.changes and pulled.files == removed.files
    fresh = await bench.begin("large")
    applied = await fresh.call(ApplyChanges(changes=removed.changes, files=removed.files))
    again = await fresh.call(PullChanges())
    checked = await fresh.call(CheckIntegrity(thorough=True))
    for taken in (sandbox, fresh):
        bench.host.release(taken.id)
    await bench.host.settle()
    return {
        "diff_entries": len(pulled.changes),
        "diff_first_cpu_ms": round(used[0], 1),
        "diff_cpu_p50_ms": median(used),
        "git_add_commit_cpu_ms": round(status, 1),
        "pytest_first_cpu_ms": round(tests, 1),
        "diff_same_after_commit_and_removed_git": same,
        "diff_applied_equal": applied.ok and (again.changes, again.files) == (removed.changes, removed.files),
        "integrity_untouched": checked.ok and checked.tampered == (),
    }


def resident_mb() -> float:
    """Memory of this process, templates included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def in_turn(bench: Bench, cache: Path, layout: Layers, base: dict[str, Any], count: int, work: Path) -> Figures:
    """Different images on one base, each used once: memory of this process, and disk."""
    sizes = 0
    resident: list[float] = []
    stored_before = stored(cache)
    names = []
    for number in range(count):
        tree = work / f"own{number}"
        tree.mkdir()
        (tree / "data").write_bytes(os.urandom(2 << 20))
        (tree / "number").write_text(str(number))
        layer = layout.layer(tar_of(tree, "own", work / "own.tar"))
        sizes += layer["size"]
        shutil.rmtree(tree)
        image = imported.take(cache, layout.image([base, layer]), f"turn{number}")
        names.append(image.name)
    # The base is in the store already, as part of the large image, so its first segment is counted here.
    base_bytes = image.segments()[0].bytes
    disk = stored(cache) - stored_before
    disk += base_bytes if disk < base_bytes else 0
    for number, name in enumerate(names):
        sandbox = await bench.begin(name)
        read, _ = await bench.sh(sandbox, "cat /own/number")
        if read.stdout != str(number):
            raise VmhostError(f"image {number} holds {read.stdout!r}")
        bench.host.release(sandbox.id)
        await bench.host.settle()
        resident.append(resident_mb())
    return {
        "images_in_turn": count,
        "resident_after_tenth_mib": round(resident[min(9, count - 1)], 1),
        "resident_after_last_mib": round(resident[-1], 1),
        "resident_growth_ratio": round(resident[-1] / resident[min(9, count - 1)], 3),
        "storage_over_base_and_layers_ratio": round(disk / (base_bytes + sizes), 3),
    }


def stored(cache: Path) -> int:
    """Bytes of all segments on disk."""
    return sum(file.stat().st_blocks * 512 for file in cache.glob("layers-*/*"))


async def measure(args: argparse.Namespace, cache: Path, work: Path) -> Figures:
    """All figures."""
    layout = Layers(work / "layout")
    started = time.process_time()
    base = base_layer(layout, work)
    path = large_image(layout, base, work, args.filler)
    started, wall = time.process_time(), time.perf_counter()
    image = imported.take(cache, path, "large")
    figures: Figures = {
        "image_mib": round(image.bytes / (1 << 20), 1),
        "image_entries": image.entries,
        "import_cpu_s": round(time.process_time() - started, 1),
        "import_wall_s": round(time.perf_counter() - wall, 1),
        "guest_memory_mb": image.memory_mb,
    }
    environment = msgspec.structs.replace(
        Environment(), backend="qemu", cache_dir=str(cache), warm=0, max_vms=16, judge_share=0
    )
    host = await Host.open(environment)
    bench = Bench(host)
    try:
        figures |= await clones(bench, args.clones)
        figures |= await diffs(bench)
        figures |= await in_turn(bench, cache, layout, base, args.images, work)
    finally:
        await host.close()
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__.split("\n")[0])
    parser.add_argument("--filler", type=int, default=2400, help="MiB of random filler in the image")
    parser.add_argument("--clones", type=int, default=10, help="clones of each kind")
    parser.add_argument("--images", type=int, default=200, help="different images in turn")
    parser.add_argument("--cache", default="", help="folder of templates and images; default: a temporary one")
    args = arguments(parser, filler=1, clones=1, images=1)
    cache = Path(args.cache or Environment().cache_dir).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix="bench-images-") as name:
        temporary_cache = Path(name) / "cache"
        temporary_cache.mkdir()
        for entry in (*cache.glob("base-*"), *cache.glob("probe.json"), *cache.glob("template-*")):
            (temporary_cache / entry.name).symlink_to(entry)
        try:
            figures = uvloop.run(measure(args, temporary_cache, Path(name)))
        except VmhostError as error:
            cannot_run(str(error))
    finish(
        figures,
        {
            "clone_attached_cpu": at_most(figures["clone_attached_cpu_p50_ms"], 300.0),
            "attached_over_in_memory": at_most(figures["attached_over_in_memory_cpu_ratio"], 1.5),
            "diff_cpu": at_most(figures["diff_first_cpu_ms"], 250.0),
            "anon_per_clone": at_most(figures["twelve_clones_anon_max_mib"], 70.0),
            "resident_growth": at_most(figures["resident_growth_ratio"], 1.05),
            "storage": at_most(figures["storage_over_base_and_layers_ratio"], 1.3),
        },
    )


if __name__ == "__main__":
    main()
