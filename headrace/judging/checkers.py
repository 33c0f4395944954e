"""Checkers: functions that grade the last message of an episode without a sandbox, found by name.

A checker from outside is an entry point of the group ``headrace.checkers`` or ``module:attribute``, as a reward is.
It has `TIMEOUT_S` for one message. A checker that needs a process of its own uses `waits_for`, so that the process's
start does not count.
"""

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from decimal import Decimal, InvalidOperation

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.plugins import Plugin
from headrace.messages.tasks import Oracle
from headrace.registry import Registry, plugins


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a checker."""

    text: str
    """The policy's last message, without its thinking."""
    prompt: str
    reference: Mapping[str, str]
    """`Grading.reference` of the task, such as ``answer``."""


Checker = Callable[[Message], float | bool]
"""A finite number; `Grading.passes_at` is the smallest one that passes."""

Ready = Callable[[Message], AbstractAsyncContextManager[None]]
"""Entered before the checker is called for the message, and left afterwards. It bounds its own time."""

CHECKERS: Registry[Checker] = Registry(
    "checkers",
    {name: f"headrace.judging.checkers:{name}" for name in ("exact", "number", "pattern")}
    | {"verifiers": "headrace.judging.verifiers:score"},
    needs=("__call__",),
)
TIMEOUT_S = 30.0
_READY = "__headrace_ready__"
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}|####\s*(\S.*)|(?i:answer)\s*(?:is|:|=)\s*(\S.*)")


class CheckerError(HeadraceError):
    """The checker gave no number; the text says why."""


def waits_for(ready: Ready) -> Callable[[Checker], Checker]:
    """Decorates a checker with `ready`, a context that is entered for each message before the checker's time limit
    begins. `ready` raises PluginError, because its failure is a fault of the installation."""

    def decorate(checker: Checker) -> Checker:
        setattr(checker, _READY, ready)
        return checker

    return decorate


async def check(oracle: Oracle, prompt: str, text: str) -> float:
    """The number that the task's checker gives for a message. CheckerError; PluginError when there is no such checker
    or when it cannot be made ready."""
    grading = oracle.grading
    checker = CHECKERS.get(grading.checker)
    message = Message(text=text, prompt=prompt, reference=grading.reference)
    ready: Ready | None = getattr(checker, _READY, None)
    async with ready(message) if ready is not None else nullcontext():
        try:
            async with asyncio.timeout(TIMEOUT_S):
                value = await asyncio.to_thread(checker, message)
        except TimeoutError:
            raise CheckerError(f"the checker {grading.checker!r} took longer than {TIMEOUT_S:g} s") from None
        except Exception as error:  # a user's function may raise anything
            raise CheckerError(f"the checker {grading.checker!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckerError(f"the checker {grading.checker!r} gave {value!r}; expected a finite number")
    return float(value)


def used(oracle: Oracle) -> tuple[Plugin, ...]:
    """The task's checker, where it comes from outside. PluginError."""
    return plugins((CHECKERS, [oracle.grading.checker] if oracle.grading.checker else []))


def final(text: str) -> str:
    r"""The part of a message that holds the final answer: the last ``\boxed{...}``, ``#### ...`` or ``answer: ...``,
    else its last line with text."""
    matches = list(_BOXED.finditer(text))
    if matches:
        return next(group for group in matches[-1].groups() if group is not None).strip()
    filled = [line.strip() for line in text.splitlines() if line.strip()]
    return filled[-1] if filled else ""


def exact(message: Message) -> bool:
    """The final answer is ``answer`` up to case, spaces and a full stop."""

    def plain(text: str) -> str:
        return " ".join(text.lower().split()).rstrip(".")

    return plain(final(message.text)) == plain(message.reference["answer"])


def number(message: Message) -> bool:
    """The last number of the final answer equals ``answer``: exactly, or within ``tolerance`` of it."""
    wanted = _value(message.reference["answer"])
    numbers = _NUMBER.findall(final(message.text))
    answer = _value(numbers[-1]) if numbers else None
    if wanted is None:
        raise ValueError(f"the reference {message.reference['answer']!r} holds no number")
    return answer is not None and abs(answer - wanted) <= Decimal(message.reference.get("tolerance", "0"))


def pattern(message: Message) -> bool:
    """The whole final answer matches the regular expression ``pattern``."""
    return re.fullmatch(message.reference["pattern"], final(message.text)) is not None


def _value(text: str) -> Decimal | None:
    match = _NUMBER.search(text)
    if match is None:
        return None
    above, slash, below = match.group().replace(",", "").partition("/")
    try:
        return Decimal(above) / Decimal(below) if slash else Decimal(above)
    except (InvalidOperation, ZeroDivisionError):
        return None
