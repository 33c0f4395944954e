"""A process of a trainer's group other than the first: `python -m headrace.training.parallel.rank`.

It needs torchrun's environment variables, and the configuration as the first line of its standard input (`ranks`).
"""

import gc
import os
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from headrace.training.parallel import group
from headrace.training.parallel.nodes import ranks
from headrace.training.parallel.nodes.local import Hello
from headrace.training.parallel.opening import joined


def _end_with_parent() -> None:
    """Exit when standard input closes: the first process has ended, and a collective might wait for it for days."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> None:
    """Join the group, repeat the calls of the first process, leave."""
    gc.freeze()  # the collector never visits what was imported, see headrace/garbage.py
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()
    if not line:
        raise SystemExit("expected the configuration on standard input; the trainer's actor starts this program")
    hello = msgspec.json.decode(line, type=Hello)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        ranks.announce()
        trainer = joined(hello.config, Path(hello.folder), int(os.environ["RANK"]))
        trainer.obey()
    except BaseException as error:
        last = f"{type(error).__name__}: {error}".replace("\n", " ")
        sys.stderr.write(f"{traceback.format_exc()}{last}\n")  # the actor quotes the last line
        sys.stderr.flush()
        os._exit(2)  # after an ordinary exit the threads of gloo would abort the process
    del trainer
    group.leave()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
