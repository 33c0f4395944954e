"""A rule that finds dissatisfaction with an agent's earlier work in the user's next prompt.

The rule wants few false finds rather than all true ones, because each find rates a run down. The words have to begin a
clause and refer to the earlier work ("that is wrong", "it still fails"): a prompt that reports another fault, or says
"if it is broken", is no find.
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
    """The words of a prompt that say that the earlier work was wrong; empty without any."""
    found = _RULES.search(prompt)
    return found.group(1) if found is not None else ""
