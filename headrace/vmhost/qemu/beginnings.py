"""Machines with their image attached, as snapshots: later clones of an image begin there.

A generic template is frozen before it knows its image, so each clone mounts the image and moves its slot into it, which
is most of what a clone costs under emulation. The second clone of an image is frozen before it is handed out, with its
image attached and its slot rehearsed (`Clone.rehearse`); what it wrote is some 5 MiB. Later clones begin with these
pages and skip the work. Beyond `MOST_MIB` the snapshots of the least recently used images go.
"""

from collections import OrderedDict

from headrace.vmhost.backend import OnEvent
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.snapshot import MachineSnapshot
from headrace.vmhost.templates.template import Template

MOST_MIB = 64.0
"""MiB of all snapshots of a host."""
REMEMBERED = 4096
"""Images of which a host knows that it had a clone."""


class Beginnings:
    """Snapshots by image and template."""

    def __init__(self, on_event: OnEvent) -> None:
        self._event = on_event
        self._known: OrderedDict[tuple[str, str], MachineSnapshot | None] = OrderedDict()
        """None: it had one clone."""
        self._learning: set[tuple[str, str]] = set()

    def find(self, template: Template) -> MachineSnapshot | None:
        """Where a new clone of this template begins; None: at the template itself."""
        key = _key(template)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    async def learn(self, clone: Clone) -> None:
        """Take a snapshot of a clone that has just started, if its image had one clone before. SandboxLost."""
        template = clone.template
        key = _key(template)
        if template.manifest.hardware.disk:  # a snapshot holds memory, not the files on a disk
            return
        if template.image is None or key in self._learning or self._known.get(key) is not None:
            return
        if key not in self._known:
            self._known[key] = None
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return
        self._learning.add(key)
        try:
            await clone.rehearse()
            taken = await clone.freeze()
        except VmhostError as error:
            self._event("image_not_prepared", f"clones of {template.image.name} attach it one by one: {error}", {})
            return
        finally:
            self._learning.discard(key)
        self._known[key] = taken
        self._known.move_to_end(key)
        total = 0.0
        for other, snapshot in reversed(list(self._known.items())):
            total += snapshot.mib if snapshot is not None else 0.0
            if snapshot is not None and total > MOST_MIB and other != key:
                del self._known[other]


def _key(template: Template) -> tuple[str, str]:
    """Image, machine and limits; and the very memory that the pages are a difference to."""
    return template.key, template.manifest.ram_hash
