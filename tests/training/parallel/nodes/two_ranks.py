"""Two ranks of a group on this machine; prints the address of every socket on which one of them listens."""

import subprocess
import sys

from tests.support.listening import listening
from tests.training.parallel.nodes.test_interfaces import GROUP


def start(rank: int, port: str) -> "subprocess.Popen[str]":
    """A rank that has not joined yet."""
    argv = [sys.executable, "-c", GROUP, str(rank), "127.0.0.1", port]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    first = start(0, "0")
    assert first.stdout is not None
    second = start(1, first.stdout.readline().strip())
    assert second.stdout is not None
    assert first.stdout.readline() == second.stdout.readline() == "joined\n"
    found = listening({first.pid, second.pid})
    assert len(found) >= 3, found  # the store, and gloo in both
    print(*{each.host for each in found})
    for rank in (first, second):
        rank.kill()
        rank.wait()
