from headrace.vmhost.backends.process import ProcessBackend


class Machines(ProcessBackend):
    """The process backend under a name of its own."""

    name = "acme"
