"""A recorded run whose attempts search for a function in words that its code does not have, then edit it.

Ten repositories have the same eight functions, each in its own text; the word of a query for a function is the same in
all of them. So an adapter that learns the words on some repositories finds functions of the others.
"""

import asyncio
from pathlib import Path

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config, Environment, Search, Tasks
from headrace.messages.rollout import ToolCall, ToolResult, Trajectory
from headrace.messages.subjects import CLOSE, SCORE, TRAJ
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.suites import write_suite
from tests.support import embedding_model, records

SUITE, REPOSITORIES = "searched", 10
WORDS = {
    "zorvex": "invoice",
    "plimar": "discount",
    "quandle": "shipment",
    "brisket": "password",
    "tovian": "calendar",
    "mexilo": "thumbnail",
    "grundy": "newsletter",
    "falken": "inventory",
}
"""A query's word to the code's."""
QUERIES = {word: f"change the {word}" for word in WORDS}


def path_of(repository: int) -> str:
    return f"shop{repository}/service.py"


def text_of(repository: int, edited: str = "") -> str:
    """The file of a repository; edited: the code's word of the function with another result."""
    return "\n\n".join(
        f"def {word}_{repository}(store):\n    {word} = store.read({repository + at})\n"
        f"    return {f'{word}, None' if word == edited else word}\n"
        for at, word in enumerate(WORDS.values())
    )


def task(repository: int) -> Task:
    return Task(
        ref=TaskRef(SUITE, f"t{repository}"),
        family="f",
        prompt="p",
        files={path_of(repository): text_of(repository).encode()},
        allowed=("**",),
        tests=TestPlan(),
        tools=("semantic_search", "write_file"),
    )


def attempt(run: str, repository: int, slot: int, word: str, query: str) -> Trajectory:
    """A search for a function, which the query's `word` names, and the edit of it."""
    issued = records.issued(f"g{repository}", slot, run=run, task=task(repository).ref)
    made = records.trajectory(issued)
    after = text_of(repository, WORDS[word])
    path = path_of(repository)
    steps = (
        ToolCall(id="0.0", name="semantic_search", arguments={"query": query}),
        ToolCall(id="1.0", name="write_file", arguments={"path": f"./{path}", "content": after}),
    )
    turns = tuple(
        msgspec.structs.replace(
            made.turns[0], index=at, calls=(call,), results=(ToolResult(call_id=call.id, ok=True, output=""),)
        )
        for at, call in enumerate(steps)
    )
    return msgspec.structs.replace(made, turns=turns, diff={path: after.encode()})


async def record(bus: Bus, run: str, *, plain: bool = False) -> None:
    """Publish the passed attempts, and for each repository a failed one that must not be learnt from. plain: queries
    have the code's words."""

    async def slot(repository: int, at: int, word: str) -> tuple[int, int, int, int]:
        passed = at < len(WORDS)
        query = (f"change the {WORDS[word]}" if plain else QUERIES[word]) if passed else "never learn this"
        made = attempt(run, repository, at, word, query)
        trajectory = await bus.publish(TRAJ.at(run=run, group=made.group), made)
        score = records.score(made.group, at, trajectory_seq=trajectory, passed=passed, task=made.task, run=run)
        return at, 0, trajectory, await bus.publish(SCORE.at(run=run, judge="j1", group=made.group), score)

    for repository in range(REPOSITORIES):
        words = [*WORDS, next(iter(WORDS))]
        slots = await asyncio.gather(*(slot(repository, at, word) for at, word in enumerate(words)))
        group = records.closed(f"g{repository}", *slots, size=len(words), run=run)
        await bus.publish(CLOSE.at(run=run, group=group.group), group)


def model(folder: Path) -> Path:
    """A small random model that has all words."""
    return embedding_model.write(folder, [text_of(at) for at in range(REPOSITORIES)] + list(QUERIES.values()))


def configuration(root: Path, model: Path | str) -> Config:
    """Of runs whose tasks are in a suite below `root`, which is written."""
    tasks = [task(at) for at in range(REPOSITORIES)]
    oracle = {"hidden": {}, "tests": TestPlan(), "expected": (), "solution": {}}
    pairs = [(each, Oracle(ref=each.ref, **oracle)) for each in tasks]  # type: ignore[arg-type]
    write_suite(SUITE, root / "suites" / SUITE, pairs, "test")
    return Config(
        search=Search(model=str(model), tokens=16, wait_s=60.0),
        environment=Environment(backend="process", cache_dir=str(root / "cache")),
        tasks=Tasks(dir=str(root / "suites")),
    )
