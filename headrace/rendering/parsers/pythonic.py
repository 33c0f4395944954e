"""Pythonic: the whole turn is a Python list of calls with literal arguments, ``[f(a=1), g()]``, of Llama 4 and LFM2."""

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from headrace.rendering.parsers.base import Span, Syntax, Types, WrittenCall
from headrace.syntax_trees import expression

_WRAPPERS = ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>")


class Pythonic(Syntax):
    """Parsed by Python's own grammar; nothing is evaluated but literals."""

    name = "pythonic"
    stops = ("<|eot|>", "<|eom|>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>")
    marks = _WRAPPERS

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """The calls of the list; a text that does not start with a bracket has none."""
        source = text
        for wrapper in _WRAPPERS:
            source = source.replace(wrapper, "")
        source = source.strip()
        if not source.startswith("["):
            return
        try:
            with warnings.catch_warnings(action="ignore"):  # such as an invalid escape
                tree = expression(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield Span(0, len(text), WrittenCall(error=f"the list of calls is not Python ({error})"))
            return
        if not isinstance(tree, ast.List) or not tree.elts or not all(isinstance(e, ast.Call) for e in tree.elts):
            return
        for element in tree.elts:
            assert isinstance(element, ast.Call)
            yield Span(0, len(text), _call(element))

    def undecided(self, content: str) -> int:
        """A list is read as a whole."""
        return 0 if content.lstrip().startswith("[") else super().undecided(content)


def _name(node: ast.expr) -> str:
    """A name or a dotted name; empty for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _call(node: ast.Call) -> WrittenCall:
    name = _name(node.func)
    if not name:
        return WrittenCall(error="expected a name before the arguments")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return WrittenCall(error=f"{name}: expected keyword arguments only")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return WrittenCall(error=f"{name}: the argument {keyword.arg} is not a literal")
    return WrittenCall(name=name, arguments=arguments)
