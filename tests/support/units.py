"""Runs generated systemd units where no systemd runs: `python -m tests.support.units FOLDER LOGS`.

It starts the services that FOLDER's headrace.target wants and that FOLDER has, each with its ExecStart line, working
directory and environment (drop-ins of headrace-.service.d included), in the order of After, and restarts them by
Restart, RestartSec, RestartPreventExitStatus and StartLimitBurst. SIGTERM stops them in reverse order. LOGS/units.json
says what each does. Left out are users, hardening and the watchdog: everything runs as the caller.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from headrace.parent_death import die_with

_PASSED = ("PATH", "HOME", "LANG")
"""Variables that systemd gives every service."""


class Unit:
    """One service."""

    def __init__(self, path: Path, logs: Path) -> None:
        """logs: folder for its output."""
        self.name, self._logs = path.name, logs
        self._settings: dict[str, list[str]] = defaultdict(list)
        for file in (path, *sorted(path.parent.glob("headrace-.service.d/*.conf"))):
            for line in file.read_text().replace("\\\n", " ").splitlines():
                if "=" in line and not line.startswith(("#", ";")):
                    key, _, value = line.partition("=")
                    self._settings[key].append(value)
        self.after = set(self._value("After").split())
        self.process: asyncio.subprocess.Process | None = None
        self.state: dict[str, object] = {"pid": 0, "restarts": 0, "ready": False, "active": "activating"}
        self.stopping = False

    def _value(self, key: str, default: str = "") -> str:
        return self._settings[key][-1] if self._settings[key] else default

    def _changed(self, **values: object) -> None:
        self.state |= values
        (self._logs / f"{self.name}.json").write_text(json.dumps(self.state))

    async def run(self) -> None:
        """Start it, and start it again by its own rule."""
        oneshot, starts = self._value("Type") == "oneshot", 0
        while not self.stopping:
            starts += 1
            code = await self._once()
            if self.stopping or (code == 0 and oneshot):
                self._changed(active="inactive" if self.stopping else "active", ready=not self.stopping)
                return
            rule = self._value("Restart", "no")
            prevented = str(code) in self._value("RestartPreventExitStatus").split()
            if prevented or rule == "no" or (rule == "on-failure" and code == 0):
                self._changed(active="inactive" if code == 0 else "failed", code=code)
                return
            if starts >= int(self._value("StartLimitBurst", "1000000")):
                self._changed(active="failed", code=code)
                return
            self._changed(restarts=starts, ready=False, code=code)
            await asyncio.sleep(float(self._value("RestartSec", "0.1")))

    async def _once(self) -> int:
        """Its exit code, after one start."""
        env = {name: os.environ[name] for name in _PASSED if name in os.environ}
        for entry in self._settings["Environment"]:
            env |= dict(word.split("=", 1) for word in shlex.split(entry))
        cwd = Path(self._value("WorkingDirectory", "/"))
        for state in self._value("StateDirectory").split():
            Path("/var/lib", state).mkdir(exist_ok=True)
        parent = os.getpid()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
            (self._logs / f"{self.name}.log").open("ab") as log,
        ):
            notified.bind(f"\0headrace-units-{os.getpid()}-{self.name}")
            notified.setblocking(False)
            asyncio.get_running_loop().add_reader(notified, self._told, notified)
            self.process = await asyncio.create_subprocess_exec(
                *shlex.split(self._value("ExecStart")),
                cwd=cwd,
                env=env | {"NOTIFY_SOCKET": f"@headrace-units-{os.getpid()}-{self.name}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )
            self._changed(pid=self.process.pid, active="active" if self._value("Type") == "simple" else "activating")
            try:
                return await self.process.wait()
            finally:
                asyncio.get_running_loop().remove_reader(notified)

    def _told(self, notified: socket.socket) -> None:
        if b"READY=1" in notified.recv(4096).splitlines():
            self._changed(ready=True, active="active")

    async def stop(self) -> None:
        """KillSignal to its process; SIGKILL to what is left of it after TimeoutStopSec."""
        self.stopping = True
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(getattr(signal, self._value("KillSignal", "SIGTERM")))
        try:
            await asyncio.wait_for(self.process.wait(), float(self._value("TimeoutStopSec", "90")))
        except TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)


async def main(folder: Path, logs: Path) -> None:
    """Run until SIGTERM."""
    target = (folder / "headrace.target").read_text()
    wanted = next(line for line in target.splitlines() if line.startswith("Wants=")).partition("=")[2].split()
    units = [Unit(folder / name, logs) for name in wanted if (folder / name).exists()]
    names, order = {unit.name for unit in units}, list[Unit]()
    while len(order) < len(units):
        ready = [unit for unit in units if unit not in order and unit.after & names <= {done.name for done in order}]
        assert ready, "After has a cycle"
        order += ready
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    running = [asyncio.create_task(unit.run()) for unit in order]
    await ended.wait()
    for unit in order:
        unit.stopping = True
    first = [unit for unit in order if not unit.after & names]
    await asyncio.gather(*(unit.stop() for unit in order if unit not in first))
    await asyncio.gather(*(unit.stop() for unit in first))
    for task in running:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
