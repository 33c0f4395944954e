"""A process of a trainer's group other than the first: `python -m headrace.training.parallel.rank`.

It needs torchrun's environment variables, and the configuration and the admitted names of outside parts as the first
two lines of its standard input (`nodes.local`).
"""

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.registry import admit
from headrace.training.parallel import group
from headrace.training.parallel.interface import StepRaised
from headrace.training.parallel.nodes import ranks
from headrace.training.parallel.nodes.local import DUMP, RAISED, Hello
from headrace.training.parallel.opening import joined

BROKEN_S = 2.0
"""Seconds after a broken connection until this process ends by itself: the process whose end broke it is to be the
first that its starter notices. It kills this one at once then."""


def _end_with_parent() -> None:
    """Exit when standard input closes: the first process has ended, and a collective might wait for it for days."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _log(level: str, event: str, text: str) -> None:
    """A line of the log as actors write it (docs/operating.md); what follows belongs to it."""
    fields = {"timestamp": datetime.now(UTC).isoformat(), "level": level, "event": event, "actor": "trainer"}
    line = msgspec.json.encode(fields | {"id": f"rank-{os.environ['RANK']}", "text": text}).decode()
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    """Join the group, repeat the calls of the first process, leave."""
    gc.freeze()  # the collector never visits what was imported, see headrace/garbage.py
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        line, admitted = pipe.readline(), pipe.readline()
    if not admitted:
        raise SystemExit("expected the configuration on standard input; the trainer's actor starts this program")
    hello = msgspec.json.decode(line, type=Hello)
    for seam, names in msgspec.json.decode(admitted, type=dict[str, tuple[str, ...]]).items():
        admit(seam, names)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.register(DUMP, all_threads=True)
    _log("info", "rank_started", f"process {os.getpid()}")
    try:
        ranks.announce()
        trainer = joined(hello.config, Path(hello.folder), int(os.environ["RANK"]))
        trainer.obey()
    except BaseException as error:
        raised = isinstance(error, StepRaised)
        last = (str(error) if raised else f"{type(error).__name__}: {error}").replace("\n", " ")
        _log("error", "rank_failed", last)
        sys.stderr.write(f"{traceback.format_exc()}{last}\n")  # the actor quotes the last line
        sys.stderr.flush()
        if group.broken(error):
            time.sleep(BROKEN_S)
        os._exit(RAISED if raised else 2)  # after an ordinary exit the threads of gloo would abort the process
    del trainer
    group.leave()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
