"""Stops a replayed step in pdb before its backward pass, with everything loaded.

The breakpoints are set in the trainer's own code. The debugger stops once: at the first backward pass, at the refusal
of the batch, or at the line that raised. `c` continues to the end.
"""

import ast
import bdb
import inspect
import pdb
import sys
from types import FrameType, TracebackType
from typing import IO, Any

from headrace.replay.step import Loaded
from headrace.training import gradient, outcome
from headrace.training.outcome import StepOutcome

WORDS = """\
step {step} of run {run}: everything is loaded, nothing has been updated
  by name: {names}
  {place}; p NAME prints, u and d move up and down the stack, n runs a line, c runs the rest of the step, q quits
"""


def debug(loaded: Loaded, stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> StepOutcome | None:
    """Take the step under pdb. Returns its outcome, None after `q`. Blocks the calling thread, which reads `stdin`."""
    debugger = _Debugger(loaded, stdin, stdout)
    for line in backward_lines():
        debugger.set_break(gradient.__file__, line, temporary=True)
    debugger.set_break(outcome.__file__, first_line("refuse"), temporary=True)
    try:
        made: StepOutcome | None = debugger.runcall(
            loaded.trainer.step, loaded.manifest, loaded.trajectories, loaded.scores
        )
        if made is not None and not debugger.stopped:
            debugger.message(f"step {loaded.manifest.step} has no backward pass: no group has an advantage")
        return made
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        debugger.reset()
        debugger.say(f"it raised {text}")
        try:
            debugger.interaction(None, _innermost(error.__traceback__))
        except bdb.BdbQuit:
            return None
        return loaded.trainer.give_up("exception", text)
    finally:
        debugger.clear_all_breaks()


def backward_lines() -> list[int]:
    """Lines of `training.gradient` that start a backward pass."""
    tree = ast.parse(inspect.getsource(gradient))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]


def first_line(function: str) -> int:
    """The first statement of a function of `training.outcome`, after its docstring."""
    tree = ast.parse(inspect.getsource(outcome))
    node = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return node.body[1 if ast.get_docstring(node) is not None else 0].lineno


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


class _Debugger(pdb.Pdb):
    """Continues to the breakpoint, and adds the loaded objects to every frame by name. A frame's own names take
    precedence; `loaded` holds all of them."""

    def __init__(self, loaded: Loaded, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True, readrc=False)
        self.prompt = "(step) " if stdin is None and sys.stdin.isatty() else ""
        self.stopped = self._begun = False
        self._loaded = loaded
        self._named: dict[str, Any] = {"loaded": loaded, **loaded._asdict(), "config": loaded.trainer.config}

    def user_line(self, frame: FrameType) -> None:
        """Continue: pdb would stop at the first line of the function that it runs."""
        if not self._begun:
            self._begun = True
            self.set_continue()
            return
        if not self.stopped:
            refused = frame.f_code.co_name == "refuse"
            self.say("the batch is refused here" if refused else "stopped before the first backward pass")
        super().user_line(frame)

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> None:
        """Add the loaded objects to the frame's names."""
        super().setup(f, tb)
        self._add_names()

    def do_up(self, arg: str) -> bool | None:
        """Like pdb's command; the frame that it selects gets the loaded objects too."""
        done = super().do_up(arg)
        self._add_names()
        return done

    def do_down(self, arg: str) -> bool | None:
        """Like pdb's command; the frame that it selects gets the loaded objects too."""
        done = super().do_down(arg)
        self._add_names()
        return done

    do_u, do_d = do_up, do_down

    def _add_names(self) -> None:
        frame_names: dict[str, Any] = self.curframe_locals  # type: ignore[assignment]
        for name, value in self._named.items():
            frame_names.setdefault(name, value)

    def say(self, place: str) -> None:
        """Print the message at the stop: the place, and the names that can be printed."""
        self.stopped = True
        names = ", ".join([*self._named, "and the locals of the frame"])
        manifest = self._loaded.manifest
        self.message(WORDS.format(step=manifest.step, run=manifest.run, names=names, place=place).rstrip())
