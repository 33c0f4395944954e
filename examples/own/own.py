"""Your own image tasks and reward.

`[tasks] suite = "own:open_tasks/words"` and `[algorithm] reward = "own:frugal"` name them; the module is found by
PYTHONPATH on every host that has an actor of `own.toml`.
"""

from headrace.algorithms.rewards import Judged
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from headrace.tasks import UnknownSuite

IMAGE = "own-app"
"""Its name in the image store of each host (`python -m image`)."""
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")


class Words:
    """Each task names a word that a script of the image should print."""

    name = "own:open_tasks/words"

    def ids(self) -> list[str]:
        """The words."""
        return list(WORDS)

    def _known(self, id: str) -> TaskRef:
        if id not in WORDS:
            raise UnknownSuite(f"{self.name} has no task {id!r}; it has {', '.join(WORDS)}")
        return TaskRef(self.name, id)

    def task(self, id: str) -> Task:
        """The agent's side: nothing but a sentence, for the files lie in the image."""
        return Task(
            ref=self._known(id),
            family="own-words",
            prompt=f"say.sh should print {id}",
            files={},
            allowed=("*.sh",),
            tests=TestPlan(kind="command", argv=("sh", "say.sh")),
            image=IMAGE,
            repository="/app",
        )

    def oracle(self, id: str) -> Oracle:
        """The judge's side: a command whose exit code decides."""
        return Oracle(
            ref=self._known(id),
            hidden={"check.sh": f'test "$(sh ./say.sh)" = {id}\n'.encode()},
            tests=TestPlan(kind="command", argv=("sh", "check.sh"), timeout_s=120.0),
            expected=("command",),
            solution={"say.sh": f"echo {id}\n".encode()},
            grading=Grading(kind="exit_code"),
        )


def open_tasks(name: str, root: object) -> Words:
    """``words``, the only suite here."""
    if name != "words":
        raise UnknownSuite(f"expected own:open_tasks/words, got own:open_tasks/{name}")
    return Words()


def frugal(judged: Judged) -> float:
    """A pass, minus a small price per token id, which differs within every group: an untrained model still gets a
    gradient."""
    ids = [id for turn in judged.trajectory.turns for id in turn.ids.tolist()]
    return float(judged.passed) + 0.1 * sum(id % 2 for id in ids) / max(1, len(ids))
