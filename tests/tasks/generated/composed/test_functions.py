"""Composed functions: no suite has them, every bug shows, and their words say what they do."""

import random
from collections import Counter

import pytest

from headrace.tasks.generated import repositories
from headrace.tasks.generated.broad_templates import BROAD
from headrace.tasks.generated.composed import functions as composed
from headrace.tasks.generated.composed.parts import either_order, right
from headrace.tasks.generated.final_templates import FINAL
from headrace.tasks.generated.templates import TRAINED, UNSEEN, Template


def broad(count: int) -> list[Template]:
    """The templates of the first broad repositories, composed ones alone."""
    made = (repositories.make("broad", number, judged=False).target.template for number in range(count))
    return [template for template in made if template not in BROAD]


def test_three_of_four_broad_functions_are_composed_and_hardly_any_comes_twice() -> None:
    taken = broad(400)
    assert 0.68 < len(taken) / 400 < 0.82
    assert len({composed.plain(template) for template in taken}) > 0.8 * len(taken)
    assert Counter(template.family for template in taken)["one_line"] > 0.4 * len(taken)


def test_no_suite_has_one_and_every_bug_of_each_shows() -> None:
    suites = (*TRAINED, *UNSEEN, *FINAL)
    for template in broad(400):
        assert template.about not in {other.about for other in suites}
        assert composed.plain(template) not in {composed.plain(other) for other in suites}
        assert repositories.every_bug_shows(template)


def test_a_function_of_a_suite_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw with the words or the code of a suite's function is dropped."""
    taken, other = TRAINED[0], composed.draw(next(n for n in range(99) if composed.draw(n).family == "one_line"))
    draws = iter([taken, other])
    monkeypatch.setattr(composed, "draw", lambda number: next(draws))
    assert repositories._composed(random.Random(0), taken.family) == other


def test_a_function_whose_bug_changes_nothing_is_dropped() -> None:
    def made(*body: str) -> Template:
        return Template(name="x", family="one_line", about="", takes=("a",), body=body)

    assert repositories.every_bug_shows(made("return {a} «+|-» 1"))
    assert not repositories.every_bug_shows(made("return {a} «+|-» 0")), "both give the same"
    assert not repositories.every_bug_shows(made("return {a}")), "there is no bug"
    assert not repositories.every_bug_shows(made("return {a} «//|%» 0")), "the right one raises"


def test_right_leaves_the_right_alternative_alone() -> None:
    assert right("«max|min»({a}, «{k}|{j}») «+|-|*» 1") == "max({a}, {k}) + 1"
    assert either_order("{s}[«1|2»:]", "'a'") == "«{s}[1:] + 'a'|'a' + {s}[1:]»"


def test_a_number_gives_the_same_function_each_time() -> None:
    assert [composed.draw(number) for number in range(50)] == [composed.draw(number) for number in range(50)]
