"""Task templates: a template with a repository pushed into every slot and preparation steps run there, frozen again.

The preparation of a task (files, installed packages, running servers, warm caches) runs once, and the clones begin
where it ended. The base template is not booted again: one of its clones is prepared, and the pages that this clone
wrote are written over a copy of its memory file (see qemu/snapshot.py). The copy makes the task template independent,
so its clones share all of it and the base template may be removed from the cache.

A recipe is stored by name beside the images in the cache. A template that is missing, damaged or made of other parts is
built again from its recipe.
"""

import asyncio
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.messages.sandbox import Exec, OpResult, PushTar, SandboxLost
from headrace.vmhost import protocol
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images.imported import NAME
from headrace.vmhost.images.packages import FLAVOURS
from headrace.vmhost.qemu import integrity, snapshot
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.templates.template import FORMAT, Template, hash_of, publish

LARGEST = 48 << 20
"""Largest size of a recipe's archive in bytes: it must fit into one frame."""
DEPTH = 8
"""Largest number of task templates that are built on one another."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a task template is made."""

    name: str
    base: str
    """The base template: ``light``, ``debian``, an imported image, another task template."""
    tree: bytes = b""
    """A tar archive, unpacked in the workspace of every slot."""
    steps: tuple[Exec, ...] = ()
    """Commands that must succeed, in order, in every slot."""


def archive(folder: Path) -> bytes:
    """A folder as a recipe's archive: with modes and links, without owners and times. VmhostError."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    out = io.BytesIO()
    try:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, arcname=path.name, filter=plain)
    except OSError as error:
        raise VmhostError(f"{folder} cannot be read: {error.strerror}") from None
    if out.tell() > LARGEST:
        raise VmhostError(f"{folder} has {out.tell() >> 20} MiB; a task template holds at most {LARGEST >> 20}")
    return out.getvalue()


def save(cache: Path, recipe: Recipe) -> None:
    """Store a recipe under its name. VmhostError."""
    if not NAME.match(recipe.name) or recipe.name in FLAVOURS or (cache / f"image-{recipe.name}").exists():
        raise VmhostError(f"a task template cannot have the name {recipe.name!r}: it is in use or not allowed")
    making = cache / f"making-task-{recipe.name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        making.write_bytes(msgspec.msgpack.encode(recipe))
        making.replace(cache / f"task-{recipe.name}")
    except OSError as error:
        with suppress(OSError):
            making.unlink(missing_ok=True)
        raise VmhostError(f"the recipe of {recipe.name} cannot be stored in {cache}: {error.strerror}") from None


def find(cache: Path, name: str) -> Recipe | None:
    """The recipe of a name. VmhostError when it is damaged."""
    path = cache / f"task-{name}"
    if not NAME.match(name) or not path.is_file():
        return None
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Recipe)
    except msgspec.DecodeError as error:
        raise VmhostError(f"the recipe {path} is damaged: {error}; build the task template again") from None


def forget(cache: Path, name: str) -> None:
    """Drop the recipe of a name, if there is one."""
    (cache / f"task-{name}").unlink(missing_ok=True)


def names(cache: Path) -> list[str]:
    """Names of all recipes."""
    return sorted(path.name.removeprefix("task-") for path in cache.glob("task-*"))


def key(recipe: Recipe, below: str) -> str:
    """A hash of the base template's key, the tree and the steps."""
    content = msgspec.msgpack.encode([FORMAT, below, recipe.tree, recipe.steps])
    return hashlib.sha256(content).hexdigest()[:16]


class NoOwner:
    """The owner of a clone outside any pool: one that is frozen or examined."""

    def ended(self, clone: Clone, cpu_ms: float) -> None:
        """Nothing is recorded."""


async def build(recipe: Recipe, below: Template, folder: Path) -> Template:
    """Prepare a clone of the base template and freeze it. VmhostError with the output of the step that failed."""
    started = time.monotonic()
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    clone = Clone(NoOwner(), below)
    try:
        await clone.start()
        for slot in range(below.manifest.slots):
            await _prepare(await clone.open(slot), recipe)
        surveyed = await integrity.survey(clone.ask)
        taken = await clone.freeze()
        await asyncio.to_thread(_write_over, below, making, taken)
        integrity.write(making, surveyed)
        manifest = msgspec.structs.replace(
            below.manifest,
            name=recipe.name,
            key=key(recipe, below.key),
            ram_hash=hash_of(making / "ram"),
            state_hash=hash_of(making / "state"),
            fixed_hash=hash_of(making / "fixed"),
            built_s=round(time.monotonic() - started, 2),
            push_mb=below.push_mb,
            levels=(below.key, *below.manifest.levels),
        )
        made = publish(making, folder, manifest)
        return msgspec.structs.replace(made, image=below.image, attached=below.image is not None)
    except SandboxLost as lost:
        raise VmhostError(f"the task template {recipe.name} could not be prepared: {lost}") from None
    finally:
        clone.kill()
        await clone.gone
        shutil.rmtree(making, ignore_errors=True)


async def _prepare(channel: Channel, recipe: Recipe) -> None:
    if recipe.tree:
        pushed = await _do(channel, PushTar(data=recipe.tree))
        if not pushed.ok:
            raise VmhostError(f"the task template {recipe.name} could not be prepared: its tree: {pushed.error}")
    for number, step in enumerate(recipe.steps, 1):
        done = await _do(channel, step)
        if not done.ok:
            output = " | ".join((done.stdout + done.stderr).strip().splitlines()[-5:])[-900:]
            command = " ".join(step.argv)[:200]
            raise VmhostError(
                f"the task template {recipe.name} could not be prepared: "
                f"step {number} ({command}): {done.error}: {output}"
            )


async def _do(channel: Channel, op: Exec | PushTar) -> OpResult:
    header, bodies = protocol.to_frame(op)
    answer, parts = await channel.call(header, bodies, protocol.deadline_s(op))
    return protocol.to_result(answer, parts, 0.0)


def _write_over(below: Template, making: Path, taken: snapshot.Snapshot) -> None:
    copied = subprocess.run(
        ["cp", "--sparse=always", "--reflink=auto", "--", str(below.ram), str(making / "ram")],
        capture_output=True,
        text=True,
    )
    if copied.returncode != 0:
        raise VmhostError(f"the base template could not be copied: {copied.stderr.strip()[-300:]}")
    (making / "ram").chmod(0o644)
    snapshot.write_ram(making / "ram", below.manifest.ram_bytes, taken)
    (making / "state").write_bytes(taken.state)
