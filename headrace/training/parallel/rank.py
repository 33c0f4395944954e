"""A process of a trainer's group other than the first: `python -m headrace.training.parallel.rank`.

torch's agent starts it (`nodes.ranks`). Its environment names the store of the group, its argument the admitted names
of outside parts; the configuration comes through the store.
"""

import faulthandler
import gc
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.registry import admit
from headrace.training.parallel import group
from headrace.training.parallel.interface import StepRaised
from headrace.training.parallel.nodes.meeting import POLL_S, STORE, of_group
from headrace.training.parallel.nodes.ranks import DUMP, RAISED, Hello
from headrace.training.parallel.opening import joined

BROKEN_S = 2.0
"""Seconds after a broken connection until this process ends by itself: the process whose end broke it is to be the
first that its agent notices. It ends this one at once then."""
_LONGEST = 2000
"""Characters of an exception's text for the other processes."""


def main() -> None:
    """Join the group, repeat the calls of the first process, leave."""
    gc.freeze()  # the collector never visits what was imported, see headrace/garbage.py
    os.dup2(2, 1)  # its starter's standard output may be data
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise SystemExit("expected torch's elastic agent as the starter, which the trainer's actor runs")
    for seam, names in msgspec.json.decode(sys.argv[1], type=dict[str, tuple[str, ...]]).items():
        admit(seam, names)
    faulthandler.register(DUMP, all_threads=True)
    rank = int(os.environ["RANK"]) + 1  # agents do not count rank 0
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) + 1)}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE)
    keys = of_group(store, os.environ["TORCHELASTIC_RUN_ID"])
    _log(rank, "info", "rank_started", f"process {os.getpid()}")
    try:
        keys.add("arrived", 1)
        while not keys.check(["hello"]):
            time.sleep(POLL_S)
        hello = msgspec.json.decode(keys.get("hello"), type=Hello)
        os.environ["LOCAL_RANK"] = str(rank % hello.config.trainer.machine_ranks)
        trainer = joined(hello.config, Path(hello.folder), rank, keys)
        trainer.obey()
    except BaseException as error:
        raised = isinstance(error, StepRaised)
        last = (str(error) if raised else f"{type(error).__name__}: {error}").replace("\n", " ")[:_LONGEST]
        _log(rank, "error", "rank_failed", last)
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
        with suppress(RuntimeError):  # node 0 has gone
            keys.set(f"why/{rank}", last)
        if group.broken(error):
            time.sleep(BROKEN_S)
        os._exit(RAISED if raised else 2)  # after an ordinary exit the threads of gloo would abort the process
    del trainer
    group.leave()
    sys.stderr.flush()
    os._exit(0)


def _log(rank: int, level: str, event: str, text: str) -> None:
    """A line of the log as actors write it; what follows belongs to it."""
    fields = {"timestamp": datetime.now(UTC).isoformat(), "level": level, "event": event, "actor": "trainer"}
    sys.stderr.write(msgspec.json.encode(fields | {"id": f"rank-{rank}", "text": text}).decode() + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
