"""Checks an adapter and applies it to the vector of a query."""

import numpy as np
from numpy.typing import NDArray

from headrace.messages.base import Array
from headrace.messages.search import AdapterFigures, SearchAdapter

Floats = NDArray[np.float32]


class AdapterError(Exception):
    """An adapter cannot be learnt, published, found or used; the text says why."""


def packed(matrix: Floats) -> Array:
    """A matrix as a message has it: the bits of float16."""
    half = matrix.astype("<f2")
    return Array("<u2", half.shape, half.tobytes())


def unpacked(matrix: Array) -> Floats:
    """The matrix of a message. AdapterError when it is not square and finite."""
    if matrix.dtype != "<u2" or len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise AdapterError(f"its matrix is {matrix.dtype} {list(matrix.shape)}, expected <u2 [width, width]")
    made = np.frombuffer(matrix.data, dtype="<f2").reshape(matrix.shape).astype(np.float32)
    if not np.isfinite(made).all():
        raise AdapterError("its matrix has numbers that are not finite")
    return made


def gain_of(figures: AdapterFigures) -> str:
    """The measured gain as text."""
    gain, low, high = (f"{100 * value:.1f}" for value in (figures.gain, figures.low, figures.high))
    return f"{gain} points of R@5 (95 % interval {low} to {high}) on {len(figures.held_out)} repositories held out"


class Adapter:
    """An adapter that may be used."""

    def __init__(self, message: SearchAdapter, model: str, width: int = 0) -> None:
        """model: identity of the embedding model in use. width: of its vectors; 0 accepts any. AdapterError for an
        adapter of another model or width, and for one without a measured gain."""
        named = f"adapter {message.hash}"
        if message.model != model:
            raise AdapterError(f"{named} belongs to the model {message.model}, and searches use {model}")
        self._matrix = unpacked(message.matrix)
        if width and len(self._matrix) != width:
            raise AdapterError(f"{named} is for vectors of {len(self._matrix)} numbers, and the model's have {width}")
        if not message.figures.low > 0.0:
            raise AdapterError(f"{named} gains {gain_of(message.figures)}: the low end is not above 0")
        self.model = f"{model}+{message.hash}"
        """Identity of the model with this adapter, as `Retrieved` names it."""

    def apply(self, vector: Floats) -> Floats:
        """The unit vector [width] of a query, adapted. Sums are made row by row in float64, so that every processor
        gives the same bits."""
        moved = vector + (self._matrix * vector[:, None]).sum(axis=0, dtype=np.float64)
        adapted: Floats = (moved / np.sqrt((moved * moved).sum())).astype(np.float32)
        return adapted
