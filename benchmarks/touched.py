"""Tests whether the integrity check finds every changed page of a machine, and whether ordinary work raises alarms.

    python -m benchmarks.touched [--templates light,debian] [--pages 24]

A process that controls a guest's kernel can write any page of the guest. Here the host writes one byte of one page of a
fresh machine, drawn from all pages that ordinary work never writes (files of the root, the kernel's text and
constants). Then the integrity check runs (headrace/vmhost/qemu/integrity.py), which must name the page. For false
alarms, one machine runs every operation of sandboxes, and operations that make the kernel rewrite its own text, with a
check after each. The cost of a check is CPU time of the host's thread; of a thorough one, also that of the machine.
"""

import argparse
import os
import random
import statistics
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.conditions import Figures, Target, at_least, at_most, cannot_run, finish
from headrace.config import Environment
from headrace.messages.sandbox import (
    Acquire,
    CheckIntegrity,
    Exec,
    FeedJob,
    FollowJob,
    GroupKey,
    ListFiles,
    Op,
    PullTree,
    RunTests,
    SandboxLost,
    Search,
    StartJob,
)
from headrace.messages.tasks import TestPlan
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu import snapshot
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.integrity import KERNEL, PAGE, Fixed

FILES = {
    "a.py": b"def f(x):\n    return x + 1\n",
    "test_a.py": b"from a import f\n\n\ndef test_f():\n    assert f(1) == 2\n",
}
STAMPS = "import socket; s = socket.socket(2, 2); s.setsockopt(1, 29, 1); s.bind(('127.0.0.1', 0)); print('on')"
"""SO_TIMESTAMP: the kernel switches branches of its text."""
OPTIONS = """
import socket
for family, kind in ((2, 1), (2, 2), (10, 1), (1, 1), (1, 2), (16, 3), (17, 3), (38, 5)):
    try:
        s = socket.socket(family, kind)
    except OSError:
        continue
    for level in (0, 1, 6, 17, 41):
        for name in range(90):
            try:
                s.setsockopt(level, name, 1)
            except OSError:
                pass
"""
MEMORY = "import mmap\nm = mmap.mmap(-1, 96 << 20)\nfor i in range(0, 96 << 20, 4096): m[i] = 1"
THREADS = "import threading, time\nfor _ in range(64): threading.Thread(target=time.sleep, args=(0.1,)).start()"
LOOKS = 50


def fixed(clone: Clone) -> Fixed:
    """The pages of that machine that no honest work writes."""
    return msgspec.msgpack.decode((clone.template.folder / "fixed").read_bytes(), type=Fixed)


def owners(known: Fixed) -> list[tuple[int, str]]:
    """Every fixed page and its owner."""
    table = np.frombuffer(known.ranges, "<u4").reshape(-1, 3).tolist()
    ranges = [(first, count, known.names[name]) for first, count, name in table] + [(*known.text, KERNEL)]
    return [(page, name) for first, count, name in ranges for page in range(first, first + count)]


def page_of(clone: Clone, path: str) -> int:
    """The first page of a file of the root file system."""
    return next(page for page, name in owners(fixed(clone)) if name == path)


def overwrite(clone: Clone, page: int, data: bytes, offset: int = 0) -> bytes:
    """Write into a page of a running machine's memory. Returns the bytes before. OSError, VmhostError."""
    low, _ = snapshot.mapping(clone.pid, clone._memory.mapped)
    memory = os.open(f"/proc/{clone.pid}/mem", os.O_RDWR)
    try:
        place = low + page * PAGE + offset
        before = os.pread(memory, len(data), place)
        if os.pwrite(memory, data, place) != len(data):
            raise OSError(5, "a page could not be written")
        return before
    finally:
        os.close(memory)


def work(template: str) -> list[tuple[str, Op]]:
    """The operations of sandboxes, by name."""

    def shell(script: str) -> Exec:
        return Exec(argv=("sh", "-c", script), timeout_s=120.0)

    def python(script: str) -> Exec:
        return Exec(argv=("python3", "-c", script), timeout_s=120.0)

    done: list[tuple[str, Op]] = [
        ("tests", RunTests(plan=TestPlan(paths=("test_a.py",)))),
        (
            "shell",
            shell("ls -la / /usr/bin; id; uname -a; cat /proc/cpuinfo; find /usr/lib -type f | head -50 | xargs cat"),
        ),
        ("search", Search(pattern="def")),
        ("list", ListFiles()),
        ("pull", PullTree()),
        ("python", python("import json, ctypes, asyncio, threading, decimal, tarfile, urllib.request")),
        ("stamps", python(STAMPS)),
        ("options", python(OPTIONS)),
        ("threads", python(THREADS)),
        ("memory", python(MEMORY)),
        ("forks", shell("for i in $(seq 100); do (sleep 1 &) ; done; sleep 1")),
        ("disk", shell("dd if=/dev/zero of=/tmp/big bs=1M; rm /tmp/big")),
        ("terminal", StartJob(argv=("sh",), terminal=True)),
    ]
    if template == "light":
        return done
    return [
        *done,
        ("pytest", RunTests(plan=TestPlan(kind="pytest", paths=("test_a.py",), timeout_s=120.0))),
        ("git", shell("git init -q . && git add -A && git -c user.email=a -c user.name=b commit -qm x && git log -p")),
        ("ripgrep", shell("rg -n def; rg -c . /usr/lib/python3.11/json")),
    ]


def request(template: str, group: str, slot: int = 0) -> Acquire:
    """A sandbox of its own machine, or one of a machine's eight."""
    fields: dict[str, Any] = {"run": "touched", "lane": "train", "role": "judge", "attempt": 0, "isolation": "group"}
    return Acquire(group=group, slot=slot, template=template, files=FILES, **fields)


async def alarms(host: Host, template: str) -> Figures:
    """Run ordinary work in one machine, with a check after each operation."""
    boxes = [await host.acquire(request(template, "work", slot)) for slot in range(4)]
    clone = host.machine(boxes[0].id)
    assert isinstance(clone, Clone)
    fresh = await looks(clone)
    false, failed = list[str](), list[str]()
    jobs = work(template)
    for number, (name, op) in enumerate(jobs):
        box = boxes[number % len(boxes)]
        result = await box.call(op)
        if isinstance(op, StartJob):
            await box.call(FeedJob(job=result.job, data=b"stty -a; exit\n"))
            await box.call(FollowJob(job=result.job, wait_s=5.0))
        failed += [name] * (not result.ok)
        false += [name] * bool((await box.call(CheckIntegrity())).tampered)
    before, started = clone.cpu_ms(), time.thread_time()
    for _ in range(4):
        false += ["thorough"] * bool((await boxes[0].call(CheckIntegrity(thorough=True))).tampered)
    thorough = (clone.cpu_ms() - before + (time.thread_time() - started) * 1000) / 4
    used = await looks(clone)
    for box in boxes:
        host.release(box.id)
    host.release_group(GroupKey("touched", "train", "judge", "work"))
    return {
        "kinds_of_work": len(jobs),
        "work_that_failed": " ".join(failed),
        "false_alarms": len(false),
        "alarmed_by": " ".join(false),
        "look_cpu_ms_p50_fresh": round(fresh, 3),
        "look_cpu_ms_p50_used": round(used, 3),
        "thorough_look_cpu_ms": round(thorough, 1),
    }


async def looks(clone: Clone) -> float:
    """Median CPU-ms of a check, which never waits."""
    costs = []
    for _ in range(LOOKS):
        started = time.thread_time()
        await clone.check_integrity()
        costs.append((time.thread_time() - started) * 1000)
    return statistics.median(costs)


async def pages(host: Host, template: str, count: int) -> Figures:
    """Write one byte of one page, each in a fresh machine."""
    rng = random.Random(f"touched/{count}")
    named = lost = kernel = total = 0
    for number in range(count):
        box = await host.acquire(request(template, f"page{number}"))
        clone = host.machine(box.id)
        assert isinstance(clone, Clone)
        all_pages = owners(fixed(clone))
        total = len(all_pages)
        page, name = rng.choice(all_pages)
        offset = rng.randrange(PAGE)
        was = os.pread(clone._memory.fd, 1, page * PAGE + offset)
        overwrite(clone, page, bytes([was[0] ^ (1 << rng.randrange(8))]), offset)
        try:
            named += await clone.check_integrity() == (name,)
        except SandboxLost:
            lost += 1
        kernel += name == KERNEL
        host.release(box.id)
        host.release_group(GroupKey("touched", "train", "judge", f"page{number}"))
    return {
        "fixed_pages": total,
        "pages_written": count,
        "of_them_the_kernels": kernel,
        "pages_named": named,
        "machines_lost": lost,
    }


async def measure(templates: list[str], count: int) -> Figures:
    """Detection and false alarms, for each template."""
    host = await Host.open(Environment(backend="qemu", warm=0))
    by_template: Figures = {}
    try:
        for template in templates:
            figures = await alarms(host, template) | await pages(host, template, count)
            by_template |= {f"{template}_{name}": value for name, value in figures.items()}
            await host.settle()
        return by_template
    finally:
        await host.close()


def main() -> None:
    """Measure; end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", default="light,debian")
    parser.add_argument("--pages", type=int, default=24, help="machines of which a page is written")
    arguments = parser.parse_args()
    templates = arguments.templates.split(",")
    try:
        figures = uvloop.run(measure(templates, arguments.pages))
    except VmhostError as error:
        cannot_run(str(error))
    targets: dict[str, Target] = {}
    for template in templates:
        targets |= {
            f"{template}_pages_named": at_least(figures[f"{template}_pages_named"], arguments.pages),
            f"{template}_false_alarms": at_most(figures[f"{template}_false_alarms"], 0),
            f"{template}_look_cpu_ms_p50_used": at_most(figures[f"{template}_look_cpu_ms_p50_used"], 1.0),
        }
    finish(figures, targets, "headrace")


if __name__ == "__main__":
    main()
