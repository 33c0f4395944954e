"""Sandbox backends by name: ``qemu``, ``container``, ``process``, entry points of ``headrace.sandboxes``,
or ``module:attribute``.

A backend is a class that follows `vmhost.backend.Backend`; it is imported when a node opens it.
"""

from headrace.messages.plugins import Plugin
from headrace.registry import PluginError, Registry, plugins
from headrace.vmhost.backend import Backend, Capabilities
from headrace.vmhost.errors import VmhostError

DEFAULT = "qemu"
"""The backend of ``[environment] backend = "auto"``."""
BACKENDS: Registry[type[Backend]] = Registry(
    "sandboxes",
    {
        "qemu": "headrace.vmhost.qemu.backend:CloneBackend",
        "container": "headrace.vmhost.backends.container.backend:ContainerBackend",
        "process": "headrace.vmhost.backends.process:ProcessBackend",
    },
    needs=("capabilities", "open"),
)


def backend_class(name: str) -> type[Backend]:
    """The class of a configured backend. VmhostError when there is none of this name."""
    try:
        return BACKENDS.get(DEFAULT if name == "auto" else name)
    except PluginError as error:
        raise VmhostError(str(error)) from None


def plugins_of(name: str) -> tuple[Plugin, ...]:
    """A configured backend that comes from outside of headrace. VmhostError when there is none of this name."""
    try:
        return plugins((BACKENDS, (DEFAULT if name == "auto" else name,)))
    except PluginError as error:
        raise VmhostError(str(error)) from None


def capabilities(name: str) -> Capabilities:
    """The capabilities of a configured backend. VmhostError when there is none of this name."""
    return backend_class(name).capabilities
