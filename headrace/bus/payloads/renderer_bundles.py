"""A run's renderer bundle on the bus: its bytes on HR_BLOB, its hash in HR_RENDERER.

Why not a file: a rollout node shares nothing with the trainer but the bus. A node that fetches
a bundle checks that its content has the hash that HR_RENDERER names; a node that differs cannot sample for the run.
"""

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages.rollout import RendererBundle, RendererRecord, renderer_key

BUCKET = "HR_RENDERER"


class BundleMismatch(BusError):
    """The run already has another bundle, or the content under its name is another one."""


async def publish(bus: Bus, run: str, bundle: RendererBundle) -> None:
    """Store the bundle and name it. A run keeps its bundle: BundleMismatch when it has another one already."""
    state = await bus.kv(BUCKET)
    entry = await state.get(renderer_key(run))
    if entry is not None and isinstance(entry[0], RendererRecord) and entry[0].sha256 != bundle.sha256:
        raise BundleMismatch(
            f"run {run} renders with bundle {entry[0].sha256[:12]}, and this trainer brings {bundle.sha256[:12]}: "
            "a run keeps its tokenizer, chat template and tools; start a new run for others"
        )
    blob = await bus.put_blob(bundle)
    await state.put(renderer_key(run), RendererRecord(run=run, sha256=bundle.sha256, blob=blob))


async def fetch(bus: Bus, run: str) -> RendererBundle | None:
    """The run's bundle; None when none was published. BundleMismatch when the content is not what its name says."""
    state = await bus.kv(BUCKET)
    entry = await state.get(renderer_key(run))
    if entry is None:
        return None
    record = entry[0]
    bundle = await bus.get_blob(record.blob) if isinstance(record, RendererRecord) else record
    if not isinstance(record, RendererRecord) or not isinstance(bundle, RendererBundle):
        raise BundleMismatch(f"run {run}: HR_RENDERER names no renderer bundle but {type(bundle).__name__}")
    if bundle.sha256 != record.sha256:
        raise BundleMismatch(f"run {run} renders with bundle {record.sha256[:12]}, its content is {bundle.sha256[:12]}")
    return bundle
