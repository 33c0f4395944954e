"""Records whose every text tries to become code where a page shows it."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
MARK = "attacked"
PAYLOAD = (
    f"\"'><img src=x onerror={MARK}=1><script>{MARK}=1</script><svg/onload={MARK}=1><iframe srcdoc=x></iframe>"
    f"<a href=javascript:{MARK}=1>x</a></title></style></script></pre>-->${{{MARK}=1}}`{{{{{MARK}=1}}}}"
)
SHOWN = f"<img src=x onerror={MARK}=1>"
"""A part of it, as a page has to show it."""


def hostile(record: T, *keep: str) -> T:
    """The record with the payload in the place of every text that its type admits, map keys included. keep: names of
    fields that stay, at any depth."""
    kind = type(record)
    tree = msgspec.to_builtins(record)
    for owner, key in list(_texts(tree, keep)):
        before = owner[key]
        owner[key] = PAYLOAD
        try:
            msgspec.convert(tree, kind)
        except msgspec.ValidationError:
            owner[key] = before
    for owner in list(_maps(tree)):
        if not owner:
            continue
        owner[PAYLOAD] = next(iter(owner.values()))
        try:
            changed = msgspec.to_builtins(msgspec.convert(tree, kind))
        except (msgspec.ValidationError, TypeError):
            changed = None
        if changed != tree:  # a struct drops a field that it does not know
            del owner[PAYLOAD]
    return msgspec.convert(tree, kind)


def _texts(tree: Any, keep: tuple[str, ...]) -> Any:
    """Places of texts: their container and key."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        if isinstance(value, str) and key not in keep:
            yield tree, key
        elif key not in keep:
            yield from _texts(value, keep)


def _maps(tree: Any) -> Any:
    if isinstance(tree, dict):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _maps(value)
