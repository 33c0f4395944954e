"""From the output of a test run to an examination, by the grading of the task."""

import json
import math

from headrace.judging.logs.registry import Contradicted, NotATestRun, parse
from headrace.judging.outcomes import RefusedOutput, read
from headrace.judging.verdicts import COMMAND, Examination, passes
from headrace.messages.sandbox import OpResult, TestOutcome
from headrace.messages.tasks import Oracle
from headrace.tasks.sealing import compare_answers
from headrace.terminal_text import plain

LARGEST = 8 << 20
"""Bytes of a log or reward file that are read."""
TAIL = 4000
"""Characters of a run's output that a certificate shows."""


def examined(
    oracle: Oracle, result: OpResult, written: bytes | None, *, touched: tuple[str, ...], alone: bool
) -> Examination:
    """The examination of one run. RefusedOutput for output that no honest run sends.

    written: the content of `Grading.file`, None where the run left no such file. Tests that crash leave none, or an
    empty one, or a log that is not that of a test run: such a candidate has failed.
    """
    grading, value = oracle.grading, None
    rewards: dict[str, float] = {}
    tests = read(result)
    if grading.kind == "reward_file":
        value = grading.lowest or 0.0
        if written and written.strip():
            value, rewards = max(reward(written), value), numbers(written)
    elif grading.kind == "exit_code":
        bad = result.code != 0 or result.timed_out
        tests = (TestOutcome(COMMAND, "failed" if bad else "passed", result.error[:500]),)
    elif grading.parser:
        tests = parsed(oracle, result, written)
    tests = compare_answers(tests, oracle.answers)
    ok = passes(oracle, tests, value)
    return Examination(
        ok=ok, tests=tests, value=value, rewards=rewards, touched=touched, alone=alone, timed_out=result.timed_out
    )


def tail(result: OpResult, log: bytes | None = None) -> str:
    """The end of a run's output, fit for a terminal: of its log, or of its streams and its error. At most `TAIL`
    characters."""
    texts = [result.stdout, result.stderr]
    if log is not None:
        texts.append(log[-4 * TAIL :].decode("utf-8", "replace"))
    texts.append(result.error)
    text = "\n".join(plain(text[-TAIL:]).strip("\n") for text in texts if text.strip())
    return text if len(text) <= TAIL else f"...{text[3 - TAIL :]}"


def parsed(oracle: Oracle, result: OpResult, written: bytes | None) -> tuple[TestOutcome, ...]:
    """The tests in a log; none where it is missing or not that of a test run. RefusedOutput where its exit code
    contradicts it."""
    log = (written or b"").decode("utf-8", "replace") if oracle.grading.file else f"{result.stdout}\n{result.stderr}"
    try:
        outcomes = parse(oracle.grading.parser, log)
    except Contradicted as error:
        raise RefusedOutput(str(error)) from None
    except NotATestRun:
        return ()
    tests = tuple(TestOutcome(name, outcome) for name, outcome in outcomes.items())
    return read(OpResult(tests=tests))


def reward(written: bytes) -> float:
    """The number in a reward file: plain, or JSON with the key ``reward`` or one number alone. RefusedOutput."""
    try:
        data = json.loads(written)
        if isinstance(data, dict):
            data = data["reward"] if "reward" in data or len(data) != 1 else next(iter(data.values()))
        value = float(data)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise RefusedOutput(f"expected a number in the reward file, got {written[:80]!r}") from None
    if not math.isfinite(value):
        raise RefusedOutput(f"expected a finite reward, got {value}")
    return value


def numbers(written: bytes) -> dict[str, float]:
    """All finite numbers in a reward file that `reward` takes, by their keys; a plain one has the key ``reward``."""
    data = json.loads(written)
    pairs = data if isinstance(data, dict) else {"reward": data}
    return {key: float(value) for key, value in pairs.items() if isinstance(value, int | float) and _finite(value)}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
