"""The versions of a run that must stay available although newer ones exist.

An open evaluation names one, and so does the newest promotion. The receiver stages and keeps them, and the trainer's
garbage collection leaves their chains. Evaluations and promotions of a branch's versions are ignored: the branch is a
run of its own and has records of its own.
"""

from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product.serving import Promotion
from headrace.messages.subjects import EVENT


class Pins:
    """The pinned versions of one run, from its records in the order of HR_EVENT."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._asked: dict[str, int] = {}
        """Id of an open evaluation to its version."""
        self._promoted: int | None = None

    @property
    def filters(self) -> list[str]:
        """The subjects of the records that `take` needs."""
        kinds = (EvalRequest.type_name, EvalResult.type_name, Promotion.type_name)
        return [EVENT.where(run=self._run, type=kind) for kind in kinds]

    @property
    def versions(self) -> list[int]:
        """The versions that are pinned now, those of evaluations first, in the order of their requests."""
        return [*self._asked.values(), *([] if self._promoted is None else [self._promoted])]

    def take(self, message: Message) -> None:
        """Apply one record; other messages change nothing."""
        if isinstance(message, EvalRequest):
            if message.policy.kind == "pinned" and message.policy.run in ("", self._run):
                self._asked[message.id] = message.policy.version
        elif isinstance(message, EvalResult):
            self._asked.pop(message.id, None)
        elif isinstance(message, Promotion) and not message.branch:
            self._promoted = message.version
