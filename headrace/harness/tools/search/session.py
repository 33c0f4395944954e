"""One episode's semantic search: sends the files that changed since the last search together with the query.

The search actor holds the index; this object holds the files from which that index was built. A resumed episode has
none and sends the whole workspace once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b

from headrace.errors import HeadraceError
from headrace.messages.sandbox import OpResult, PullTree
from headrace.messages.search import Retrieved, Searcher, SearchLost, SearchReply, SearchRequest
from headrace.messages.tasks import Task

Pull = Callable[[PullTree], Awaitable[OpResult]]
MOST_BYTES = 32 << 20
"""Most bytes of a workspace that can be searched; a larger one raises UnsearchableWorkspace."""
MOST_NAMES = 200_000
"""Most names of files and of the folders around each; the hash tree of a workspace costs time for each."""


class UnsearchableWorkspace(HeadraceError):
    """The workspace is too large or cannot be read; the tool returns the text to the policy."""


def template_of(task: Task) -> str:
    """A hash of the initial state of a task's sandboxes; the search actor caches vectors under it."""
    digest = blake2b(f"{task.machine}\0{task.repository}".encode(), digest_size=16)
    for path, data in sorted(task.files.items()):
        digest.update(b"\0%s\0%d\0" % (path.encode("utf-8", "surrogatepass"), len(data)) + data)
    return digest.hexdigest()


class SearchSession:
    """The searches of one episode."""

    def __init__(
        self,
        searcher: Searcher,
        run: str,
        template: str,
        patterns: tuple[str, ...] = ("**",),
        recorded: Mapping[str, Retrieved] | None = None,
    ) -> None:
        """patterns: globs of the searched paths. recorded: in a replay, the evidence of each call by call id; an answer
        must have its mode and its model."""
        self._searcher, self._run, self._template = searcher, run, template
        self._patterns, self._recorded = patterns, recorded or {}
        self._digest = self._root = ""
        self._files: dict[str, bytes] = {}
        self._lock = asyncio.Lock()

    async def find(self, query: str, limit: int, pull: Pull, call_id: str) -> SearchReply:
        """The ranked chunks of the workspace as it is now. UnsearchableWorkspace, SearchLost, SandboxLost."""
        async with self._lock:
            changed, deleted = await self._changes(pull)
            reply = await self._ask(self._root, changed, deleted, query, limit, call_id)
            if reply.failure == "unknown_base":
                reply = await self._ask("", self._files, (), query, limit, call_id)
            if reply.failure:
                raise SearchLost(f"{reply.failure}: {reply.detail}")
            self._root = reply.root
            return reply

    async def _ask(
        self, base: str, files: dict[str, bytes], deleted: tuple[str, ...], query: str, limit: int, call_id: str
    ) -> SearchReply:
        recorded = self._recorded.get(call_id)
        return await self._searcher.ask(
            SearchRequest(
                run=self._run,
                template=self._template,
                base=base,
                files=files,
                deleted=deleted,
                query=query,
                limit=limit,
                mode=recorded.mode if recorded is not None else None,
                model=recorded.model if recorded is not None else "",
            )
        )

    async def _changes(self, pull: Pull) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """Files that changed since the last search, and the paths of deleted files."""
        if self._root:
            now = await pull(PullTree(patterns=()))
            if now.ok and now.digest == self._digest:
                return {}, ()
        result = await pull(PullTree(patterns=self._patterns, limit=MOST_BYTES))
        if not result.ok or result.truncated:
            too_large = f"the repository holds more than {MOST_BYTES >> 20} MiB of text, too much to search"
            raise UnsearchableWorkspace(result.error or too_large)
        if sum(path.count("/") + 1 for path in result.files) > MOST_NAMES:
            raise UnsearchableWorkspace(
                f"the files of the repository and the folders around each are more than {MOST_NAMES} names, too many "
                "to search"
            )
        before, self._files, self._digest = self._files, dict(result.files), result.digest
        if not self._root:
            return self._files, ()
        changed = {path: data for path, data in self._files.items() if before.get(path) != data}
        return changed, tuple(sorted(set(before) - set(self._files)))
