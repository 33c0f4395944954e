"""A trainer in which one step raises."""

from typing import Any

from headrace.actors.trainer.actor import Trainer


class Raising(Trainer):
    """A step that raises at its start, once."""

    async def _in_thread(self, work: Any) -> Any:
        if self.status == "step 1" and not hasattr(self, "raised"):
            self.raised = True
            raise RuntimeError("out of luck")
        return await super()._in_thread(work)
