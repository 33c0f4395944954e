"""The suites of users: empty machines, to which each request brings prompt and files; and what clients' loops run."""

from collections.abc import Sequence

from headrace.messages.product import CLIENT_SUITE
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.base import UnknownSuite

WORKSPACE = "workspace"
LIGHT = "light"
"""The task without an image: a light machine."""


class WorkspaceSuite:
    """A task per image; `LIGHT` is the one without."""

    name = WORKSPACE

    def ids(self) -> Sequence[str]:
        """The one that needs no image; every image's name is an id too."""
        return (LIGHT,)

    def task(self, id: str) -> Task:
        """A machine without files."""
        return Task(
            ref=TaskRef(WORKSPACE, id),
            family="agent",
            prompt="",
            files={},
            image="" if id == LIGHT else id,
            allowed=("**",),
            tests=TestPlan(kind="pytest"),
        )

    def oracle(self, id: str) -> Oracle:
        """UnknownSuite: users rate these tasks."""
        raise UnknownSuite(f"the suite {WORKSPACE} has no oracles: its tasks are rated by users")


class ClientSuite:
    """The tasks of loops outside: only the clients that post their sessions know them."""

    name = CLIENT_SUITE

    def ids(self) -> Sequence[str]:
        """None."""
        return ()

    def task(self, id: str) -> Task:
        """UnknownSuite."""
        raise UnknownSuite(f"the tasks of suite {CLIENT_SUITE} are at the clients that run them")

    def oracle(self, id: str) -> Oracle:
        """UnknownSuite."""
        raise UnknownSuite(f"the suite {CLIENT_SUITE} has no oracles: its attempts are rated by the clients")
