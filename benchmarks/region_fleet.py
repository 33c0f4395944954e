"""A hub and regions in network namespaces (`wide_area`), with the brokers of deploy/regions and `headrace actor`
processes.

Idea: the caller is in the hub's namespace; every process of a region starts in the region's, under a host name of its
own, so that its node has the region's name. Processes end with the caller, also when it is killed.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

from benchmarks.wide_area import WideArea
from headrace.bus.broker import credentials, regions
from headrace.bus.broker.permissions import REGIONAL
from headrace.bus.broker.server import Server, find_binary
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare
from headrace.parent_death import die_with

PATIENCE_S = 300.0
HUB = "hub"
OBJECTS_PORT = 8900


class Fleet:
    """The hub, the regions and their processes."""

    def __init__(self, area: WideArea, folder: Path) -> None:
        self.area, self.folder = area, folder
        self.hub = Server(folder / HUB, host=area.hub.address, prepared=True)
        self.brokers: list[subprocess.Popen[bytes]] = []
        self.actors: dict[Path, subprocess.Popen[bytes]] = {}
        """Log file to process."""
        self.objects = folder / "objects"
        """Full snapshots, at the hub."""
        self.objects_url = f"http://{area.hub.address}:{OBJECTS_PORT}"

    async def start(self) -> None:
        """The hub's broker with its streams."""
        regions.prepare_hub(self.hub.folder, host=self.area.hub.address)
        await self.hub.start()
        self.admin = await Bus.connect(self.hub.url, role="admin", credentials=self.hub.credentials)
        await declare(self.admin)
        self.objects.mkdir()
        runner = web.AppRunner(web.Application())
        runner.app.router.add_static("/", self.objects)
        await runner.setup()
        await web.TCPSite(runner, self.area.hub.address, OBJECTS_PORT).start()

    async def join(self, name: str) -> None:
        """A region's broker with its mirror."""
        place = self.area.regions[name]
        key = self.hub.folder / regions.LINKS
        link = f"nats-leaf://{self.area.hub.address}:7422"
        folder = regions.prepare_region(self.folder / name / "broker", name, link, key)
        credentials.trust(self.hub.credentials, folder / "credentials" / credentials.WRITERS, REGIONAL)
        for keys in self.folder.glob("*/broker/credentials"):  # and all regions accept each other's records
            credentials.trust(keys, self.hub.credentials / credentials.WRITERS)
        argv = [find_binary(), "-c", str(folder / "nats.conf"), "-a", place.address, "-p", "4222"]
        argv = [*self._inside(name), *argv, "-sd", str(folder / "store"), "-l", str(folder / "log")]
        self.brokers.append(_start(argv, self.folder / f"{name}.broker.log"))
        url, keys = self._broker_of(name)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                admin = await Bus.connect(url, role="admin", credentials=keys)
                break
            except BusError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
        await regions.declare_mirror(admin)
        await admin.close()

    def _inside(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.area.regions[name].namespace)

    def _broker_of(self, place: str) -> tuple[str, Path]:
        """Address and credentials of a place's broker."""
        if place == HUB:
            return self.hub.url, self.hub.credentials
        return f"nats://{self.area.regions[place].address}:4222", self.folder / place / "broker" / "credentials"

    def actor(self, place: str, names: str, config: Path, run: str) -> None:
        """Start one process of actors (`names`, comma-separated) at the hub or in a region."""
        url, keys = self._broker_of(place)
        words = [sys.executable, "-m", "headrace.cli", "actor", names, "--config", str(config)]
        words += ["--run", run, "--url", url, "--credentials", str(keys)]
        if place != HUB:
            named = ("unshare", "--uts", "sh", "-c", f'hostname {place} && exec "$@"', "sh")
            words = [*self._inside(place), *named, *words]
        log = self.folder / f"{place}.{names.partition(',')[0].partition(':')[0]}.{run}.log"
        self.actors[log] = _start(words, log)

    async def present(self, keys: str, count: int) -> None:
        """Wait until `count` actors are in the presence bucket under `keys`, so that process starts are not
        measured."""
        presence = await self.admin.kv("HR_PRESENCE")
        async with asyncio.timeout(PATIENCE_S):
            while len(await presence.keys(keys)) < count:
                self.check()
                await asyncio.sleep(0.1)

    def check(self) -> None:
        """RuntimeError with the end of its log when a process of actors has ended."""
        for log, child in self.actors.items():
            if child.poll() is not None:
                raise RuntimeError(f"{log.name} ended with {child.returncode}: {log.read_text()[-2000:]}")

    def stop_actors(self) -> None:
        """End the actors; the brokers stay."""
        _end([*self.actors.values()])
        self.actors.clear()

    def stop(self) -> None:
        """End every process but the hub's broker."""
        self.stop_actors()
        _end(self.brokers)


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    with open(log, "wb") as out:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: die_with(parent, signal.SIGKILL),
        )


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.send_signal(signal.SIGTERM)
    for child in children:
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
