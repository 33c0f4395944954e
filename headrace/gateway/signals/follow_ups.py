"""A rule that finds dissatisfaction with an agent's earlier work in the user's next prompt.

The rule prefers precision to recall, because each match rates a run down. The words must begin a clause and refer to
the earlier work ("that is wrong", "it still fails"). A prompt that reports another fault, or says "if it is broken",
does not match.
"""

import re

_WORK = r"(?:that|this|it|your\ (?:changes?|fix|code|patch|edits?|version|answer))"
_NOT = r"(?:does|did|is|was)(?:\ not|n['\u2019]?t)"
_RULES = re.compile(
    rf"""(?:^|[.,;:!?\n]\s*|\b(?:but|no|sorry|please)\s+)(
        {_WORK}(?:\ is|['\u2019]s|\ was|\ are|\ were)\ (?:still\ )?(?:wrong|broken|incorrect|worse|useless)
      | {_WORK}\ (?:still\ )?{_NOT}\ (?:work|help|compile|fix\ \w+|what\ I\ (?:asked|wanted|meant))
      | {_WORK}\ still\ (?:fails|crashes|breaks)
      | (?:that['\u2019]s\ )?not\ what\ I\ (?:asked|wanted|meant)
      | you\ (?:broke|deleted\ the\ wrong|misunderstood)
      | (?:undo|revert|roll\ back)\ (?:that|this|it|your|everything)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)


def dissatisfied(prompt: str) -> str:
    """The words of a prompt that call the earlier work wrong; empty if there are none."""
    match = _RULES.search(prompt)
    return match.group(1) if match is not None else ""
