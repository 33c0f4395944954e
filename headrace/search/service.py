"""The indexes of a node: states of workspaces by their roots, the vectors that they share, and the model.

`find` and `embed_some` block, so that an actor runs them in threads of its own; they may run at the same time.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from headrace.messages.search import Hit, Mode, SearchReply, SearchRequest
from headrace.search.chunks import MOST_WORK, indexed
from headrace.search.embeddings import Vectors
from headrace.search.index import Index, IndexPart, Parts, Piece
from headrace.search.models import SearchModel, identity_of, plugin
from headrace.search.tree import content_hash

MOST_INDEXES = 256
MOST_HELD = 6 * MOST_WORK
"""Work of all files that the held indexes have, which bounds their memory: about 60 bytes per unit at most. The least
recently used indexes beyond it are dropped; their sessions send the whole workspace again."""
SLICE = 32
"""Chunks that one call of `embed_some` embeds."""


class Embedder(Protocol):
    """Texts to unit vectors."""

    width: int

    def embed(self, texts: list[str], batch: int = 8) -> NDArray[np.float32]:
        """Vectors [texts, width]."""


class Indexes:
    """Everything that the search actor holds."""

    def __init__(self, identity: str, open_model: Callable[[], Embedder], width: int, folder: Path | None) -> None:
        """identity: of model and precision. open_model: called when the first vector is needed."""
        self.identity, self._open_model, self._embedder = identity, open_model, None
        self.vectors = Vectors(folder / identity if folder is not None else None, width)
        self._indexes: OrderedDict[str, Index] = OrderedDict()
        self._templates: OrderedDict[str, str] = OrderedDict()
        """Roots whose vectors are still missing, each with its template; the newest last."""
        self._parts: Parts = WeakValueDictionary()
        self._uses: Counter[IndexPart] = Counter()
        """Number of held indexes with a part."""
        self._held = 0
        self._lock, self._opening = threading.Lock(), threading.Lock()

    _embedder: Embedder | None

    def update(self, request: SearchRequest) -> Index | None:
        """The index of the request's workspace; None when this node does not hold its base (any more), or has not the
        contents of a file that the base left out."""
        with self._lock:
            base = self._indexes.get(request.base)
        if request.base and base is None:
            return None
        self.vectors.load(request.template)
        hashes = dict(base.files) if base is not None else {}
        contents = {path: data for path, data in request.files.items() if indexed(path)}
        hashes |= {path: content_hash(data) for path, data in contents.items()}
        for path in request.deleted:
            hashes.pop(path, None)
        parts = self._parts
        index = base.changed(hashes, contents, parts) if base is not None else Index.of(hashes, contents, parts)
        if index is None:
            return None
        with self._lock:
            if index.root not in self._indexes:
                self._hold(index)
            index = self._indexes[index.root]
            self._indexes.move_to_end(index.root)
            while len(self._indexes) > MOST_INDEXES or (self._held > MOST_HELD and len(self._indexes) > 1):
                self._drop(self._indexes.popitem(last=False)[1])
            if index.missing(self.vectors):
                self._templates[index.root] = request.template
                self._templates.move_to_end(index.root)
        return index

    def _hold(self, index: Index) -> None:
        self._indexes[index.root] = index
        for part in index.parts:
            self._held += 0 if self._uses[part] else part.work
            self._uses[part] += 1

    def _drop(self, index: Index) -> None:
        for part in index.parts:
            self._uses[part] -= 1
            if not self._uses[part]:
                del self._uses[part]
                self._held -= part.work

    def ready(self, index: Index) -> bool:
        """Whether every chunk has its vector."""
        return not index.missing(self.vectors)

    def embed_some(self) -> bool:
        """Embed up to `SLICE` chunks of the newest workspace that lacks some; False when none does."""
        with self._lock:
            while self._templates:
                root, template = next(reversed(self._templates.items()))
                index = self._indexes.get(root)
                missing = index.missing(self.vectors) if index is not None else []
                if missing:
                    break
                self._templates.pop(root)
            else:
                return False
        # Texts of similar length are embedded together, so that little is padded.
        part: list[Piece] = sorted(missing, key=lambda piece: (piece.size, piece.hash))[:SLICE]
        self.vectors.put(
            template, [piece.hash for piece in part], self._model().embed([piece.chunk.text for piece in part])
        )
        return True

    def find(self, index: Index, query: str, limit: int, mode: Mode) -> SearchReply:
        """Rank the chunks. Hybrid needs an index that is `ready`."""
        if mode == "hybrid" and index.pieces:
            index.ready(self.vectors)
            chunks = index.hybrid(query, self._model().embed([query], 1)[0], limit)
        else:
            chunks = index.keyword(query, limit)
        hits = tuple(
            Hit(piece.chunk.path, piece.chunk.first, piece.chunk.lines, piece.hash, score) for score, piece in chunks
        )
        return SearchReply(
            root=index.root,
            model=self.identity,
            mode=mode,
            hits=hits,
            chunks=len(index.pieces),
            left_out=index.left_out,
        )

    def _model(self) -> Embedder:
        with self._opening:
            if self._embedder is None:
                self._embedder = self._open_model()
            return self._embedder


def open_indexes(model: SearchModel, tokens: int, folder: Path | None) -> Indexes:
    """The indexes of a node with a model from `models.find`; torch is imported when the first vector is needed."""
    identity = identity_of(plugin(model, tokens).source)

    def load() -> Embedder:
        from headrace.search.encoder import Encoder

        return Encoder(model.folder, tokens)

    return Indexes(identity, load, model.width, folder)
