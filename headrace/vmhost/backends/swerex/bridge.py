"""The server's side of the `swerex` backend: agents whose channels are files that the host writes and reads by HTTP.

SWE-ReX runs one command at a time and has no stream, so nothing may wait inside of a request. The host uploads chunks
into the folder ``in``; the bridge writes what the agents answer into ``out``, as text, because the server reads text
alone. Both are numbered from 0. A chunk of ``in`` is the number of a sandbox, a length, and bytes of its channel: the
first chunk of a number makes the sandbox, an empty one ends it, and number 0 ends the bridge. A line of ``out`` is a
number and bytes in Base64; without bytes that sandbox has ended. The file ``alive``, which the host writes again and
again, holds how many files of ``out`` it has read; when it grows old the host is gone, and everything ends. The file
``written`` holds how many there are: the server prints a traceback for every file that it does not find.

It is started with the standard library and the slot agent's files alone; the agents are those of the `process` backend.
"""

import base64
import importlib.util
import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

from headrace.vmhost.guest import local

HEAD = struct.Struct("!II")
"""Number of the sandbox, length of the bytes that follow."""
SILENT_S = 120.0
"""Age of ``alive`` after which the host is taken for gone."""
_FILE = 1 << 20
"""Most bytes of channels in one file of ``out``."""
_BUSY_S, _IDLE_S, _BUSY_FOR_S = 0.004, 0.05, 1.0


class _Bridge:
    def __init__(self, place: str, control: socket.socket) -> None:
        self._place, self._control = place, control
        self._agents: dict[int, socket.socket] = {}
        self._unsent: dict[int, bytearray] = {}
        self._read = self._written = self._removed = 0

    def serve(self) -> None:
        """Carry bytes until the host ends this or is gone."""
        last = 0.0
        while self._host_lives():
            pause = _BUSY_S if time.monotonic() - last < _BUSY_FOR_S else _IDLE_S
            chunk = self._chunk()
            if chunk is not None:
                last = time.monotonic()
                number, data = chunk
                if number == 0:
                    return
                self._take(number, data)
            if self._carry(0 if chunk is not None else pause):
                last = time.monotonic()

    def _host_lives(self) -> bool:
        with suppress(OSError, ValueError):
            path = f"{self._place}/alive"
            if time.time() - os.stat(path).st_mtime > SILENT_S:
                return False
            with open(path) as file:
                read = int(file.read() or 0)
            for number in range(self._removed, min(read, self._written)):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self._place}/out/{number}")
                self._removed = number + 1
            return True
        return os.path.isdir(self._place)

    def _chunk(self) -> tuple[int, bytes] | None:
        """The next chunk from the host; None until all of it is there: the server may copy it to its place."""
        path = f"{self._place}/in/{self._read}"
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if len(data) < HEAD.size or len(data) < HEAD.size + HEAD.unpack_from(data)[1]:
            return None
        os.unlink(path)
        self._read += 1
        return HEAD.unpack_from(data)[0], data[HEAD.size :]

    def _take(self, number: int, data: bytes) -> None:
        if number not in self._unsent:
            ours, theirs = socket.socketpair()
            root = f"{self._place}/{number}"
            os.mkdir(root)
            with theirs:
                request = json.dumps({"root": root, "join": []}).encode()
                socket.send_fds(self._control, [request], [theirs.fileno()])
            ours.setblocking(False)
            self._agents[number], self._unsent[number] = ours, bytearray()
        if data:
            self._unsent[number] += data
        elif number in self._agents:
            self._agents.pop(number).close()

    def _carry(self, pause: float) -> bool:
        """Wait for the agents and pass bytes on. False when there were none."""
        numbers = {agent: number for number, agent in self._agents.items()}
        writing = [agent for agent, number in numbers.items() if self._unsent[number]]
        readable, writable, _ = select.select(list(numbers), writing, [], pause)
        for agent in writable:
            unsent = self._unsent[numbers[agent]]
            with suppress(OSError):  # an agent that has ended is read below
                del unsent[: agent.send(unsent[:_FILE])]
        lines = []
        for agent in readable:
            number = numbers[agent]
            try:
                data = agent.recv(_FILE // max(1, len(readable)))
            except OSError:
                data = b""
            if not data:
                self._agents.pop(number).close()
            lines.append(f"{number} {base64.b64encode(data).decode()}")
        if lines:
            self.write("\n".join(lines))
        return bool(readable or writable)

    def write(self, text: str) -> None:
        """The next file of ``out``."""
        with open(f"{self._place}/out/{self._written}", "w") as file:
            file.write(text)
        self._written += 1
        with open(f"{self._place}/written.new", "w") as file:
            file.write(str(self._written))
        os.rename(f"{self._place}/written.new", f"{self._place}/written")


def main(place: str) -> None:
    """Serve the host from this folder, and remove it in the end."""
    os.setsid()
    for name in ("in", "out"):
        os.makedirs(f"{place}/{name}", exist_ok=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warm = os.fork()
    if warm == 0:
        ours.close()
        local.main(theirs.fileno())
        os._exit(0)
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bridge = _Bridge(place, ours)
    try:
        facts = {"python": platform.python_version(), "pytest": importlib.util.find_spec("pytest") is not None}
        bridge.write(json.dumps(facts))
        bridge.serve()
    finally:
        for agent in bridge._agents.values():
            agent.close()
        ours.close()
        with suppress(ChildProcessError):
            os.waitpid(warm, 0)  # it waits for its agents
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
