"""The ids of a generated suite: a range of seeds as text."""

from collections.abc import Sequence
from typing import overload


class SeedIds(Sequence[str]):
    """A range of seeds as text, without making the list."""

    def __init__(self, seeds: range) -> None:
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "SeedIds": ...
    def __getitem__(self, index: int | slice) -> "str | SeedIds":
        return SeedIds(self._seeds[index]) if isinstance(index, slice) else str(self._seeds[index])

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id.isascii() and id.isdigit() and str(int(id)) == id and int(id) in self._seeds
