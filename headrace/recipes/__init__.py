"""`headrace init`: the configuration of a run from a model folder, a suite and the hardware, each value with its
reason."""
