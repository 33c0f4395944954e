"""The live page of a run: its static files, its process, and records that the broker cannot restrict."""
