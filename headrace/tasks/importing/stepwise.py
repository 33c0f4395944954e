"""The steps of a Harbor task: ``[[steps]]`` of task.toml and the folders ``steps/NAME``.

All steps have one sandbox. Files of ``workdir`` are written when their step begins. A step's tests lie over the task's
own, and its verifier's settings over those of the task.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import UNSET

from headrace.messages.tasks import Step, Steps, StepTests
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportRefused, limits_of
from headrace.tasks.importing.tables import list_of, table_of, text_at
from headrace.tasks.importing.verification import VerifierPlace, solution_of, tests_of

_KEYS = frozenset({"name", "agent", "verifier", "min_reward", "artifacts"})
_OF_STEP = {"agent": {"timeout_sec", "user"}, "verifier": {"timeout_sec", "user", "env", "collect"}}
_OF_STEP["verifier"] |= {"environment_mode", "environment"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Stepwise(NamedTuple):
    """The steps of a task."""

    steps: tuple[Step, ...]
    tests: Steps
    time_s: float | None
    """The agent's time over all steps; None where a step has no limit."""


def read(folder: Path, config: dict[str, Any], place: VerifierPlace, notes: list[str]) -> Stepwise | None:
    """The steps of a task's folder; None of a task without. ImportRefused for a setting that has no form here."""
    tables = list_of(config, "steps")
    if not tables:
        return None
    strategy = config.get("multi_step_reward_strategy") or "mean"
    if strategy not in ("mean", "final"):
        raise ImportRefused(f"multi_step_reward_strategy: expected mean or final, got {strategy!r:.80}")
    reward: Literal["mean", "final"] = "final" if strategy == "final" else "mean"
    steps: list[Step] = []
    tests: list[StepTests] = []
    times: list[float | None] = []
    for number, table in enumerate(tables, 1):
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in [step.name for step in tests]:
            raise ImportRefused(f"steps, entry {number}: expected a name that no other step has, got {name!r:.80}")
        _refuse(name, table, folder / "steps" / name)
        prompt = text_at(folder / "steps" / name / "instruction.md")
        if not prompt:
            raise ImportRefused(f"expected steps/{name}/instruction.md")
        files = _files(folder / "steps" / name / "workdir")
        notes += files.notes
        steps.append(Step(prompt=prompt, files=files.files, entries=files.special))
        tests.append(_tests(folder, name, table, config, place, notes))
        agent = table_of(config, "agent") | table_of(table, "agent", f"steps.{name}.")
        limits = limits_of({"time_s": agent.get("timeout_sec")})
        times.append(limits.time_s if limits else None)
        if agent.get("user") or table_of(table, "verifier").get("user"):
            notes.append("steps.agent.user or steps.verifier.user")
    return Stepwise(tuple(steps), Steps(tests=tuple(tests), reward=reward), _together(times))


def _refuse(name: str, table: dict[str, Any], folder: Path) -> None:
    """ImportRefused for a setting of a step that has no form here."""
    where = f"steps.{name}"
    if table.get("healthcheck"):
        raise ImportRefused(f"{where}.healthcheck: sandboxes here have no health check")
    if unknown := sorted({str(key) for key in table} - _KEYS - {"healthcheck"}):
        raise ImportRefused(f"{where}.{unknown[0]} is no setting of a step that is known here")
    for part, keys in _OF_STEP.items():
        if unknown := sorted({str(key) for key in table_of(table, part, f"{where}.")} - keys):
            raise ImportRefused(f"{where}.{part}.{unknown[0]} is not possible here")
    if (folder / "workdir" / "setup.sh").exists():
        raise ImportRefused(f"steps/{name}/workdir/setup.sh: no command runs here between two steps")


def _files(folder: Path) -> trees.Tree:
    return trees.read(folder) if folder.is_dir() else trees.Tree({}, {})


def _tests(
    folder: Path, name: str, table: dict[str, Any], config: dict[str, Any], place: VerifierPlace, notes: list[str]
) -> StepTests:
    """The judge's part of a step."""
    common, own = table_of(config, "verifier"), table_of(table, "verifier")
    verifier = common | own
    verifier["env"] = table_of(common, "env", "verifier.") | table_of(own, "env", f"steps.{name}.verifier.")
    if "environment" in own and "environment_mode" not in own:  # a table of the step's own makes it separate
        verifier.pop("environment_mode", None)
    elif own.get("environment_mode") == "shared" and "environment" not in own:
        verifier.pop("environment", None)
    contexts = [path for path in (folder / "tests", folder / "steps" / name / "tests") if path.is_dir()]
    declared = [*list_of(config, "artifacts"), *list_of(table, "artifacts", f"steps.{name}.")]
    try:
        made = tests_of(verifier, contexts or [folder / "steps" / name / "tests"], declared, place, notes)
    except ImportRefused as error:
        raise ImportRefused(f"step {name}: {error}") from None
    variables = table_of(table_of(config, "solution"), "env", "solution.")
    solved = solution_of(folder / "steps" / name / "solution", variables, place, notes)
    return StepTests(
        name=name,
        hidden=made.hidden.files,
        entries=made.hidden.special,
        tests=made.plan,
        script=solved.script,
        solution=solved.tree.files or UNSET,
        solution_entries=solved.tree.special,
        separate=made.separate,
        allowed=made.allowed,
        verifier=made.verifier,
        min_reward=_least(name, table.get("min_reward")),
    )


def _least(name: str, value: Any) -> dict[str, float]:
    """The condition of a step, by the keys of its reward file. ImportRefused."""
    least = {} if value is None else value if isinstance(value, dict) else {"reward": value}
    for key, number in least.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e9:
            raise ImportRefused(f"steps.{name}.min_reward: expected numbers, got {key} = {number!r:.80}")
    return {str(key): float(number) for key, number in least.items()}


def _together(times: Sequence[float | None]) -> float | None:
    """The sum of the steps' time limits; None where a step has none."""
    limits = [time for time in times if time is not None]
    return sum(limits) if len(limits) == len(times) else None
