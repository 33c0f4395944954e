"""How long a test waits for an event that must happen."""

PATIENCE_S = 240.0
"""Far above the longest wait that a loaded machine needs, also while another process builds the guest images, and below
pytest's own limit of a test (pyproject.toml): a test that waits in vain says for what."""
