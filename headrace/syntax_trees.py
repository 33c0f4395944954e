"""Python's own parser, for processes with several threads.

CPython 3.11 counts the depth of a tree while it builds it, in a place that all threads share. A collection of garbage
can let another thread run meanwhile; if that one parses too, `ast.parse` fails with SystemError ("AST constructor
recursion depth mismatch"). So one thread parses at a time.
"""

import ast
import threading

_parsing = threading.Lock()


def parsed(source: str | bytes) -> ast.Module:
    """The syntax tree of a module. SyntaxError, ValueError, RecursionError and MemoryError as of `ast.parse`."""
    with _parsing:
        return ast.parse(source)


def expression(source: str) -> ast.expr:
    """The syntax tree of an expression. Errors as of `parsed`."""
    with _parsing:
        return ast.parse(source, mode="eval").body
