"""Fetches the missing pieces of a snapshot file from several sources at once.

The idea: every source has a few workers, and all of them take pieces from one queue, so a fast source delivers more. A
source that fails, ends too early or sends other bytes than the manifest names is not asked again; its pieces go back
into the queue, and what it sent that was right stays.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from headrace.weights.transfer.incoming import IncomingFile, Piece
from headrace.weights.transfer.sources import Layout, Source, SourceFailed, layout_of

LANES = 4
"""Pieces that are read from one source at once."""
MOST_SOURCES = 8
"""Sources that are read at once."""

Tell = Callable[[str], Awaitable[None]]
"""Reports a source that failed, as one sentence."""


async def fetch(file: IncomingFile, sources: Sequence[Source], tell: Tell) -> None:
    """Read missing pieces until none is left or every source has failed; `file.missing` are those that are left.

    OSError when the file cannot be written.
    """
    queue = deque(file.missing)
    waiting = deque(sources)
    reading: dict[asyncio.Task[bool], Source] = {}
    try:
        while queue or reading:
            while queue and waiting and len(reading) < MOST_SOURCES:
                source = waiting.popleft()
                reading[asyncio.create_task(_from(source, file, queue, tell))] = source
            if not reading:
                break
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = reading.pop(task)
                if task.result():  # it is asked again for what another source gives back
                    waiting.append(source)
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        file.missing = list(queue)


async def _from(source: Source, file: IncomingFile, queue: deque[Piece], tell: Tell) -> bool:
    """Read pieces of the queue from one source until the queue is empty (True) or the source fails (False)."""
    try:
        layout = await layout_of(source, file.manifest.tensors, file.names)
    except SourceFailed as error:
        await tell(str(error))
        return False
    failures: list[str] = []
    lanes = [asyncio.create_task(_lane(source, layout, file, queue, failures)) for _ in range(LANES)]
    try:
        await asyncio.gather(*lanes)
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    if failures:
        await tell(failures[0])
    return not failures


async def _lane(source: Source, layout: Layout, file: IncomingFile, queue: deque[Piece], failures: list[str]) -> None:
    """Read one piece after the other. When another lane of the source fails, this one ends after its piece, which may
    be right."""
    while queue and not failures:
        piece = queue.popleft()
        unread = [piece]
        try:
            data = await source.read(*layout.span(piece))
            unread = await asyncio.to_thread(file.add, piece, data)
        except SourceFailed as error:
            failures.append(str(error))
        finally:
            queue.extend(unread)
        if unread and not failures:
            block = unread[0].parts[0]
            name = file.manifest.tensors[block.tensor].name
            failures.append(
                f"{source.name} sent other bytes than version {file.manifest.version} has in block {block.block} "
                f"({name} from element {block.start})"
            )
