"""Traces of repairs with more tools than a repair needs: the warm start for measuring what the price of effort changes.

A trace looks around before it edits: it lists files, reads the module, searches by meaning and by expression, and
writes a to-do list, each with the probability `LOOKS`. A call shares the turn of the call before it with the
probability `JOINED`. So a policy starts with many ways to do the same repair, and reinforcement decides which remain.
Terminal, lint and write_file are not in the traces: the sandbox of traces runs no programs, and a whole file is long.
"""

import random

import msgspec

from headrace.tasks.generated import repositories
from headrace.tasks.generated.traces import FINISH, TEST, Answer, Call, Fault, Play, edit_line, unread, wrong_line
from headrace.vmhost.guest.lines import bodies

TOOLS = (
    *("list_files", "read_file", "search", "semantic_search", "edit_file", "edit", "write_file", "terminal"),
    *("run_tests", "lint", "todo", "finish"),
)
"""All that a policy gets by default, but the terminal's sessions."""
LOOKS, JOINED = 0.45, 0.4
QUOTES = 0.3
"""Share of right edits that quote the old line instead of its number."""


def play(made: repositories.Made, fault: Fault, rng: random.Random, answer: Answer) -> Play:
    """One trace of a policy that looks around."""
    made = msgspec.structs.replace(made, task=msgspec.structs.replace(made.task, tools=TOOLS))
    game = Play(made, answer)
    if fault == "quits":
        game.turn(FINISH)
        return game
    if fault == "unread":
        return _played(game, [unread(made, rng), TEST, FINISH], rng)
    change = wrong_line(made, rng) if fault else _right(made, rng)
    looks = [look for look in _looks(made) if rng.random() < LOOKS]
    looks.append(("search", {"query": f"def {made.target.name}"}))
    _played(game, looks, rng)
    return _played(game, [change, FINISH] if fault == "careless" else [change, TEST, FINISH], rng)


def _looks(made: repositories.Made) -> tuple[Call, ...]:
    return (
        ("todo", {"items": f"[ ] find {made.target.name}\n[ ] fix\n[ ] test"}),
        ("list_files", {}),
        ("semantic_search", {"query": made.target.about}),
        ("read_file", {"path": made.path}),
    )


def _right(made: repositories.Made, rng: random.Random) -> Call:
    text = made.task.files[made.path].decode()
    old = bodies(made.task.files[made.path])[made.line - 1]
    if text.count(old) == 1 and rng.random() < QUOTES:
        return ("edit", {"path": made.path, "old": old, "new": made.fixed})
    return edit_line(made.path, made.line, made.fixed)


def _played(game: Play, calls: list[Call], rng: random.Random) -> Play:
    """Write the calls in turns; finish has a turn of its own."""
    turn: list[Call] = []
    for call in calls:
        if turn and (rng.random() >= JOINED or call == FINISH):
            game.turn(*turn)
            turn = []
        turn.append(call)
    game.turn(*turn)
    return game
