"""Parts of the probe of exact mode: its operands, and its checks on a GPU."""
