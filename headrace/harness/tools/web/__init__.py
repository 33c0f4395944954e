"""Tools that read the web. A task offers them only where it allows network access (toolbox.py)."""
