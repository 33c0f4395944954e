"""The embedded engine: the policy's own model, sampled in a worker thread."""
