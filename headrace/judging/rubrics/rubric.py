"""A rubric: criteria from a TOML file, and the value that follows from their answers."""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.judging import CriterionScore
from headrace.messages.tasks import Criterion


class RubricError(HeadraceError, exit_status=WRONG_INPUT):
    """A rubric, a card or a labels file cannot be used; the text says which, where, and what was expected."""


class Rubric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `[judge] rubric` names."""

    name: str
    criteria: tuple[Criterion, ...]


def load(path: str) -> Rubric:
    """Read a rubric. RubricError."""
    try:
        rubric = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), Rubric)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RubricError(
            f"{path} is not a rubric: {error}; expected name and [[criteria]] with id, text, weight and pitfall"
        ) from None
    check(rubric.criteria, path)
    return rubric


def check(criteria: Sequence[Criterion], where: str) -> None:
    """RubricError for ids that occur twice, empty texts, and weights that are not positive."""
    seen: set[str] = set()
    for criterion in criteria:
        if criterion.id in seen:
            raise RubricError(f"{where}: the criterion id {criterion.id!r} occurs twice")
        if not criterion.id or not criterion.text.strip():
            raise RubricError(f"{where}: every criterion needs an id and a text, got {criterion.id!r}")
        if not 0.0 < criterion.weight < 1e6:
            raise RubricError(f"{where}: {criterion.id}: expected a weight above 0 (a pitfall subtracts it)")
        seen.add(criterion.id)
    if criteria and all(criterion.pitfall for criterion in criteria):
        raise RubricError(f"{where}: expected at least one criterion that is no pitfall")


def value(scores: Sequence[CriterionScore]) -> float:
    """The weights of met criteria minus those of met pitfalls, divided by the weights of all criteria that are no
    pitfalls; 0 where every weight is 0. At most 1, without a lower bound."""
    whole = sum(score.weight for score in scores if not score.pitfall)
    if not whole:
        return 0.0
    return sum((-score.weight if score.pitfall else score.weight) * score.met for score in scores) / whole


def digest(*parts: Any) -> str:
    """A hash of plain data and structs."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
