"""The parts from outside that this process may import: those that its own configuration names.

A configuration is the operator's own where the command line names its file; each ``module:attribute`` in it is admitted
to the registries (headrace/registry.py). The configuration of a recorded run is not: it is data, as the run's records
are. A name in it is resolved if the operator's own configuration names it too, or the option `--plugin`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.config import Config, ConfigError, load, parse
from headrace.launch.runs import RunError
from headrace.registry import SEAMS, admit, admitted

CHANGED = ("algorithm.reward", "algorithm.advantage", "algorithm.weighting")
"""Keys of names among those that `--with` accepts."""


def own(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """As `config.load`, of a file that the operator named for this process: its names are admitted. ConfigError."""
    config = load(path, overrides)
    _admit(config)
    return config


def changes(entries: Sequence[str]) -> None:
    """Admit the names in ``section.key=value`` of a command line (`--with`). ConfigError."""
    _admit(parse("", "--with", [entry for entry in entries if entry.partition("=")[0].strip() in CHANGED]))


def _admit(config: Config) -> None:
    for seam, names in named(config).items():
        admit(seam, names)


def suite(name: str) -> str:
    """Admit the sources of a suite that the command line names; returns the name."""
    admit("suites", suite_sources([name]))
    return name


def named(config: Config) -> dict[str, tuple[str, ...]]:
    """Each ``module:attribute`` of a configuration, by seam."""
    tasks, algorithm = config.tasks, config.algorithm
    suites = (tasks.suite, tasks.heldout, tasks.unseen, *config.evaluation.every_suites)
    used: dict[str, tuple[str, ...]] = {
        "tools": tasks.tools,
        "engines": (config.engine.kind,),
        "sandboxes": (config.environment.backend,),
        "suites": suite_sources(suites),
        "rewards": (algorithm.reward,),
        "renderers": (config.policy.renderer,),
        "advantages": (algorithm.advantage,),
        "losses": (algorithm.weighting,),
        "readers": tuple(source.kind for source in config.mid_training.data),
    }
    extra = config.run.plugins
    names = {seam: (*used.get(seam, ()), *extra.get(seam, ())) for seam in {**used, **extra}}
    return {seam: outside for seam, given in names.items() if (outside := tuple(name for name in given if ":" in name))}


def suite_sources(suites: Iterable[str]) -> tuple[str, ...]:
    """The sources of suites. A text that names no suite has none."""
    given = [name for name in suites if ":" in name]
    if not given:
        return ()
    from headrace.tasks import UnknownSuite
    from headrace.tasks.suites import sources

    named: list[str] = []
    for name in given:
        try:
            named += sources(name)
        except UnknownSuite:
            continue
    return tuple(named)


def require_own(config: Config) -> None:
    """Refuse to start processes under a configuration with a name that this process has not admitted, because they
    would take it for their own. RunError."""
    mine = admitted()
    for seam, names in named(config).items():
        for name in names:
            if name not in mine.get(seam, ()):
                raise RunError(
                    f"the run's configuration names {name!r:.200} ({seam}), and this command's own does not: if you "
                    f"trust it, add --set 'run.plugins.{seam}=[\"{name:.200}\"]'"
                )


def plugin(text: str) -> tuple[str, str]:
    """Seam and name of ``SEAM=MODULE:ATTRIBUTE``. ConfigError."""
    seam, equals, name = text.partition("=")
    if seam not in SEAMS or not equals or ":" not in name:
        raise ConfigError(f"--plugin: expected SEAM=MODULE:ATTRIBUTE with one of {', '.join(SEAMS)}, got {text!r:.200}")
    return seam, name
