"""Delays the import of a package until something of it is used.

nats-py imports aiohttp for its WebSocket transport, which actors and commands seldom use: a third of the processor time
with which a command begins. The package stays complete: its first use loads it. `importlib.util.LazyLoader` does not
do this in Python 3.11, because there the import statement itself reads an attribute.
"""

import importlib.util
import sys
import threading
from types import ModuleType

_LOCK = threading.RLock()


class _Delayed(ModuleType):
    """A module whose first missing attribute runs its code."""

    def __getattr__(self, attribute: str) -> object:
        with _LOCK:
            spec = self.__spec__
            if self.__dict__.pop("__waiting__", False) and spec is not None and spec.loader is not None:
                spec.loader.exec_module(self)
        try:
            return self.__dict__[attribute]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}") from None


def delay_import(name: str) -> None:
    """Put a module in place that loads itself at its first use. Does nothing for one that is loaded or missing."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Delayed
    module.__dict__["__waiting__"] = True
    sys.modules[name] = module
