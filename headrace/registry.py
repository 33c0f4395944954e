"""A registry per seam: headrace's own parts and those that users bring, found by name.

A name is looked up in this order: a built-in of the seam; an entry point of the group ``headrace.<seam>`` (`SEAMS`) in
any installed distribution; ``module:attribute``, which needs no installation, only a module that Python can import.
Built-ins are written ``module:attribute`` too, so a registry imports nothing until a name is asked for, and a low
folder may hold the registry of a seam that a higher folder implements.

Names arrive in messages, HTTP bodies, tasks and recorded runs. So a ``module:attribute`` is resolved only where it was
admitted: `admit` is called with the names of the configuration that the operator gave this process
(launch/admission.py), and nowhere else. Any other one is an unknown name, and nothing is imported for it.

Whatever is no built-in is a plugin: `Registry.plugin` gives its version and the hash of its source. Records that depend
on it carry both, and a node with another hash refuses (Law 4). The hash covers the file of a single module, and every
Python file of the top-level package otherwise: a helper beside the plugin's own file changes what it does as well.

A part may take options of the configuration: it has a parameter `options` whose annotation is a msgspec.Struct of its
own. `Registry.bound` makes that struct from the table, so a plugin's options have types, defaults and errors.

Trade-off: libraries that a plugin imports are not hashed; their versions belong to the environment, as torch's does.
"""

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.plugins import Plugin

T = TypeVar("T")

SEAMS = (
    "tools",
    "engines",
    "sandboxes",
    "suites",
    "rewards",
    "renderers",
    "advantages",
    "losses",
    "checkers",
    "readers",
)
_admitted: dict[str, set[str]] = {}
"""Seam to the names from the operator's own configuration."""


class PluginError(HeadraceError, exit_status=WRONG_INPUT):
    """A name of a seam cannot be used; the text says which, what was expected and what there is."""


def admit(seam: str, names: Iterable[str]) -> None:
    """Let this process resolve these names of a seam. Call it only with names that the operator gave this process, in
    its configuration or on its command line; never with names of a message or a record."""
    if seam not in SEAMS:
        raise ValueError(f"expected a seam, one of {', '.join(SEAMS)}; got {seam!r}")
    _admitted.setdefault(seam, set()).update(names)


def admitted() -> dict[str, tuple[str, ...]]:
    """The admitted names by seam, for a process that this one starts."""
    return {seam: tuple(sorted(names)) for seam, names in sorted(_admitted.items()) if names}


def require(seam: str, name: str) -> None:
    """PluginError for a name that was not admitted; the text says how an operator admits it."""
    if name not in _admitted.get(seam, ()):
        raise PluginError(
            f"headrace.{seam}: {name!r:.200} is unknown here and nothing was imported: it is neither built in nor an "
            f"entry point, and this node's own configuration does not name it; an operator who trusts it sets "
            f"[run.plugins] {seam}, or gives --plugin {seam}=NAME to a command on a recorded run"
        )


class Registry(Generic[T]):
    """The parts of one seam by name."""

    def __init__(self, seam: str, builtin: Mapping[str, str], needs: Sequence[str] = ()) -> None:
        """seam: one of `SEAMS`. builtin: name to ``module:attribute``. needs: attributes that every part must have;
        a plugin without one of them is refused when it is loaded."""
        if seam not in SEAMS:
            raise ValueError(f"expected a seam, one of {', '.join(SEAMS)}; got {seam!r}")
        self.seam, self._builtin, self._needs = seam, dict(builtin), tuple(needs)

    def names(self) -> tuple[str, ...]:
        """Built-ins in their order, then the installed entry points, sorted."""
        return (*self._builtin, *sorted(set(_entry_points(self.seam)) - set(self._builtin)))

    def builtin(self, name: str) -> bool:
        """Whether headrace itself has a part of this name."""
        return name in self._builtin

    def get(self, name: str) -> T:
        """The part itself: whatever its ``module:attribute`` names. PluginError when there is none, when its import
        fails or when it lacks what the seam needs."""
        part = _load(self.seam, name, self._target(name))
        if missing := [attribute for attribute in self._needs if not hasattr(part, attribute)]:
            raise PluginError(
                f"headrace.{self.seam}: {name!r} has no {', '.join(missing)}; docs/extending.md shows one"
            )
        return cast(T, part)

    def bound(self, name: str, options: Mapping[str, object], where: str) -> T:
        """The part with its options, for a seam whose parts are functions. where: the configuration's table.

        PluginError as in `get`, for an option that the part does not have and for a value of another type.
        """
        part: Any = self.get(name)
        made = self.options(name, options, where)
        return cast(T, part if made is None else functools.partial(part, options=made))

    def options(self, name: str, options: Mapping[str, object], where: str) -> msgspec.Struct | None:
        """The options that the part reads, in its own type; None for a part without any. PluginError as in `bound`."""
        kind = _options_of(self.get(name))
        if kind is None:
            if options:
                raise PluginError(f"{where}: {self.seam} {name!r} takes no options, got {', '.join(options)}")
            return None
        if unknown := sorted(options.keys() - set(kind.__struct_fields__)):
            expected = ", ".join(kind.__struct_fields__)
            raise PluginError(
                f"{where}.{unknown[0]}: {self.seam} {name!r} has no such option; expected one of {expected}"
            )
        try:
            return msgspec.convert(options, kind)
        except msgspec.ValidationError as error:
            raise PluginError(f"{where}: {self.seam} {name!r}: {error}") from None

    def plugin(self, name: str) -> Plugin | None:
        """Version and source hash of a part from outside; None for a built-in. PluginError as in `get`."""
        target = self._target(name)
        if name in self._builtin:
            return None
        _load(self.seam, name, target)
        module = target.partition(":")[0]
        return Plugin(seam=self.seam, name=name, version=_version(self.seam, name, module), source=source_hash(module))

    def _target(self, name: str) -> str:
        entries = _entry_points(self.seam)
        if name in self._builtin:
            if name in entries:
                raise PluginError(f"headrace.{self.seam}: {entries[name].value} has the name of a built-in, {name!r}")
            return self._builtin[name]
        if name in entries:
            return entries[name].value
        module, colon, attribute = name.partition(":")
        if not colon or not module or not attribute:
            raise PluginError(
                f"headrace.{self.seam}: expected one of {', '.join(self.names()) or 'no built-ins'} or "
                f"module:attribute, got {name!r:.200}"
            )
        require(self.seam, name)
        return name


def plugins(*used: tuple["Registry[Any]", Sequence[str]]) -> tuple[Plugin, ...]:
    """The plugins among the used names of several seams, in their order; built-ins are left out."""
    plugins = [registry.plugin(name) for registry, names in used for name in dict.fromkeys(names)]
    return tuple(plugin for plugin in plugins if plugin is not None)


def merged(*parts: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """The plugins of several parts, in their order, each once. Two sources of one name both stay."""
    return tuple(dict.fromkeys(plugin for part in parts for plugin in part))


def differing(recorded: Sequence[Plugin], here: Sequence[Plugin]) -> str:
    """Why this node may not go on with a record: one sentence, empty when every recorded plugin is the same here."""
    mine = {(plugin.seam, plugin.name): plugin for plugin in here}
    for plugin in recorded:
        other = mine.get((plugin.seam, plugin.name))
        where = f"headrace.{plugin.seam}: {plugin.name}"
        if other is None:
            return f"{where} was used by the run and is not configured here"
        if other.source != plugin.source:
            return (
                f"{where} has source hash {other.source[:12]} (version {other.version or 'none'}) on this node and "
                f"{plugin.source[:12]} (version {plugin.version or 'none'}) in the run; install the run's version"
            )
    return ""


@lru_cache(256)
def source_hash(module: str) -> str:
    """blake2b-256 of a module's file, or of all Python files of its top-level package. PluginError without source."""
    loaded = importlib.import_module(module)
    top = importlib.import_module(module.partition(".")[0])
    # A namespace package has a folder twice where `sys.path` has it in two spellings, as the working directory.
    folders = {Path(folder).resolve() for folder in getattr(top, "__path__", ())}
    if folders:
        files = sorted(
            (path.relative_to(folder).as_posix(), path) for folder in folders for path in folder.rglob("*.py")
        )
    else:
        file = getattr(loaded, "__file__", None) or ""
        files = [(f"{module}.py", Path(file))] if file.endswith(".py") else []
    if not files:
        raise PluginError(f"{module}: its Python source is not on this node, so nodes cannot agree on it")
    digest = blake2b(digest_size=32)
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@lru_cache(16)
def _entry_points(seam: str) -> dict[str, importlib.metadata.EntryPoint]:
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=f"headrace.{seam}"):
        other = points.get(entry.name)
        if other is not None and other.value != entry.value:
            raise PluginError(
                f"headrace.{seam}: two distributions name {entry.name!r} ({other.value} and {entry.value}); "
                "uninstall one, or write module:attribute"
            )
        points[entry.name] = entry
    return points


def _options_of(part: Any) -> type[msgspec.Struct] | None:
    """The type of the parameter `options` of a function, or of an object that is called; None without one. PluginError
    for another type."""
    parameter = inspect.signature(part).parameters.get("options")
    if parameter is None:
        return None
    kind = parameter.annotation
    if isinstance(kind, str):  # alone: other annotations may name what is imported for type checkers only
        called = part if inspect.isroutine(part) else type(part).__call__
        with suppress(AttributeError):
            kind = functools.reduce(getattr, kind.split("."), sys.modules[called.__module__])
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise PluginError(f"{part!r}: its parameter `options` needs the annotation of a msgspec.Struct, got {kind!r}")
    return kind


def _load(seam: str, name: str, target: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        part: object = importlib.import_module(module)
        for piece in attribute.split("."):
            part = getattr(part, piece)
    except Exception as error:  # a plugin's import may raise anything
        hint = "; put its folder on PYTHONPATH" if _not_found(error, module) else ""
        raise PluginError(
            f"headrace.{seam}: {name!r} cannot be loaded: {type(error).__name__}: {error}{hint}"
        ) from error
    return part


def _not_found(error: Exception, module: str) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name in {module, module.partition(".")[0]}


def _version(seam: str, name: str, module: str) -> str:
    entry = _entry_points(seam).get(name)
    if entry is not None and entry.dist is not None:
        return entry.dist.version
    top = module.partition(".")[0]
    return str(getattr(sys.modules.get(top), "__version__", ""))
