"""An expression in words and in code, with the points that a bug may hit."""

import re
from typing import NamedTuple


class Part(NamedTuple):
    """An expression in words and in code. joined: parentheses are needed inside another one."""

    words: str
    code: str
    joined: bool = False

    @property
    def said(self) -> str:
        """The words inside other words."""
        return f"({self.words})" if self.joined else self.words

    @property
    def inner(self) -> str:
        """The code inside an operation."""
        return f"({self.code})" if self.joined else self.code


def right(code: str) -> str:
    """The code without the points that a bug may hit: points do not nest."""
    return re.sub(r"«([^«»|]*)[^«»]*»", r"\1", code)


def either_order(first: str, second: str) -> str:
    """A sum whose bug is the other order."""
    first, second = right(first), right(second)
    return f"«{first} + {second}|{second} + {first}»"
