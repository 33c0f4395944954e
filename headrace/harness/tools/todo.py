"""todo: the policy's plan as a list, which the trajectory records.

Every call writes the whole list, so the last call is the list, and no state is lost when another actor resumes the
episode. A reward can read it from the trajectory, for example to penalise entries that are open at the end.
"""

from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace

MARKS = {"[ ]": "open", "[~]": "in progress", "[x]": "done"}
_MOST, _LONGEST = 50, 200


class TodoTool:
    """Replaces the to-do list."""

    schema = ToolSchema(
        "todo",
        "write the whole to-do list: one entry a line, beginning with [ ] open, [~] in progress or [x] done",
        (),
        Parameter("items", "the list"),
    )
    writes = False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """How many entries are open, in progress and done, or which line is not an entry."""
        lines = [line.strip() for line in arguments["items"].strip("\n").split("\n") if line.strip()]
        if len(lines) > _MOST:
            return Answer(f"{len(lines)} entries; at most {_MOST}", ok=False)
        counts = dict.fromkeys(MARKS.values(), 0)
        for number, line in enumerate(lines, 1):
            mark, text = line[:3], line[3:].strip()
            if mark not in MARKS or not text:
                return Answer(f"line {number}: expected [ ], [~] or [x] and a text, got {line[:40]!r}", ok=False)
            if len(text) > _LONGEST:
                return Answer(f"line {number}: {len(text)} characters; at most {_LONGEST}", ok=False)
            counts[MARKS[mark]] += 1
        return Answer(", ".join(f"{count} {state}" for state, count in counts.items()))


TOOL = TodoTool()
