"""Commands that watch a run: page, terminal, logs, exporters."""
