"""finish: the end of the task; the loop stops after the turn that calls it."""

from headrace.harness.tools.base import Answer, Workspace
from headrace.rendering.schemas import BY_NAME


class FinishTool:
    """Ends the episode."""

    schema, writes = BY_NAME["finish"], True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Nothing to do."""
        return Answer("done")


TOOL = FinishTool()
