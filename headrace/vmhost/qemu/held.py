"""The memory of templates that a host keeps loaded: within a budget, the least recently used ones go first."""

import fcntl
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TextIO

from headrace.vmhost.qemu.memory import Memory
from headrace.vmhost.templates.template import Template


class Held(NamedTuple):
    """A template's memory, and the lock on its files."""

    memory: Memory
    lock: TextIO


class Dropped(NamedTuple):
    """A template that was dropped, and the MiB that its memory occupied."""

    folder: Path
    mb: float


def read(template: Template) -> Held:
    """Read a template's memory, and keep the cache's garbage collection from removing its files. Blocks. VmhostError,
    OSError."""
    memory = template.memory
    lock = (template.folder / "manifest.json").open()
    fcntl.flock(lock, fcntl.LOCK_SH)
    return Held(memory, lock)


class HeldTemplates:
    """Memories by the folders of their templates, in order of use; templates of several images share one."""

    def __init__(self, budget_mb: int) -> None:
        """budget_mb: MiB that they should occupy at most; 0: no limit."""
        self.budget_mb = budget_mb
        self._held: dict[Path, Held] = {}

    def __contains__(self, template: Template) -> bool:
        return template.folder in self._held

    @property
    def mb(self) -> float:
        """MiB that they occupy."""
        return sum(held.memory.resident_mb for held in self._held.values())

    def keep(self, template: Template, held: Held) -> None:
        """Hold what `read` gave, in place of an earlier memory of the same folder."""
        before = self._held.pop(template.folder, None)
        if before is not None:
            before.lock.close()
        self._held[template.folder] = held

    def use(self, template: Template) -> None:
        """Make a held template the most recently used one."""
        self._held[template.folder] = self._held.pop(template.folder)

    def drop(self, needed: Collection[Path]) -> list[Dropped]:
        """Drop memories until the rest is within the budget. needed: folders of those that stay in any case."""
        total, dropped = self.mb, []
        for folder in [folder for folder in self._held if folder not in needed]:
            if not self.budget_mb or total <= self.budget_mb:
                break
            held = self._held.pop(folder)
            held.lock.close()
            size = held.memory.resident_mb
            total -= size
            dropped.append(Dropped(folder, size))
        return dropped

    def close(self) -> None:
        """Give up the locks."""
        for held in self._held.values():
            held.lock.close()
