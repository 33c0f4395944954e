"""One process of a trainer's group, any but the first: `python -m headrace.training.parallel.rank`.

It needs torchrun's environment variables, and the configuration as the first line of its standard input (`ranks`).
"""

import os
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from headrace.training.parallel import group
from headrace.training.parallel.ranks import Hello
from headrace.training.parallel.trainer import joined


def _end_with_parent() -> None:
    """The other end of standard input is the first process; a collective that waits for it may wait for long."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> None:
    """Join the group, make the calls of the first process, leave."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()
    if not line:
        raise SystemExit("expected the configuration on standard input; the trainer's actor starts this program")
    hello = msgspec.json.decode(line, type=Hello)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        trainer = joined(hello.config, Path(hello.folder), int(os.environ["RANK"]))
        trainer.obey()
    except BaseException as error:
        last = f"{type(error).__name__}: {error}".replace("\n", " ")
        sys.stderr.write(f"{traceback.format_exc()}{last}\n")  # the actor quotes the last line
        sys.stderr.flush()
        os._exit(2)  # threads of gloo would abort an ordinary end
    del trainer
    group.leave()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
