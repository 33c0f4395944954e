"""Earlier versions of sharded weights: this process's rows, written into the one sharded model on demand.

A sharded model cannot be copied, and there is no memory for a second one. So a version is rebuilt in place: its served
rows are the shards until another version is requested, or until `release` restores the masters. Served rows keep their
bits when they are converted to float32 and rounded again.
"""

from collections.abc import Iterator

from torch import Tensor

from headrace.policy.seam import PolicyModel
from headrace.training.parallel.state import ShardedState
from headrace.training.served.versions import Log, Versions, undo


class ShardedVersions(Versions):
    """As `Versions`; every process must request the same versions in the same order."""

    def __init__(self, state: ShardedState) -> None:
        """state: holds the current weights, which change in place."""
        super().__init__(state.model, state.version)
        self._state = state
        self._there = state.version
        self._rows: dict[int, dict[str, Tensor]] = {}

    def rows(self, version: int) -> dict[str, Tensor]:
        """This process's served rows of a version. KeyError when it is not kept."""
        if version == self._current:
            state = self._state
            return {name: state.served(name, state.current(name)) for name in state.sharded.local}
        if version not in self._logs:
            raise KeyError(version)
        if version not in self._rows:
            later = min(v for v in (*self._logs, self._current) if v > version)
            newer = self.rows(later)
            older = undo(newer, self._logs[version])
            # Copies, because the shards, which may hold the newer rows, get another version's.
            self._rows[version] = {name: older[name] if name in older else rows.clone() for name, rows in newer.items()}
        return self._rows[version]

    def __getitem__(self, version: int) -> PolicyModel:
        if version == self._there:
            return self._model
        if version == self._current:
            self._put_back()
        else:
            self._state.show(self.rows(version))
            self._there = version
        return self._model

    def _put_back(self) -> None:
        self._state.put_back()
        self._there = self._current

    def advance(self, version: int, log: Log) -> None:
        """As `Versions`."""
        super().advance(version, log)
        self._there = version

    def release(self) -> None:
        """Restore the current weights and free the memory of other versions."""
        self._put_back()
        self._rows.clear()

    def __iter__(self) -> Iterator[int]:
        yield from (*self.earlier, self._current)
