"""Draws a composed function by its number."""

import random

from headrace.tasks.generated.composed.bodies import Bodies
from headrace.tasks.generated.composed.parts import right
from headrace.tasks.generated.templates import Template, multi_line, one_line

DRAWS = 10**9
"""Numbers of draws."""


def plain(template: Template) -> str:
    """The right code of a template, with placeholders in place of names."""
    return right("\n".join(template.body))


def draw(number: int) -> Template:
    """The template of a number, not yet checked."""
    rng = random.Random(f"headrace/composed/{number}")
    grammar = Bodies(rng)
    if rng.random() < 0.4:
        result = grammar.result(rng.choice((1, 1, 2)))
        return one_line(f"composed_{number}", " ".join(sorted(grammar.takes)), result.words, result.code)
    words, lines = grammar.several()
    return multi_line(f"composed_{number}", " ".join(sorted(grammar.takes)), words, *lines)
