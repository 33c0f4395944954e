"""The live page of a run: its static files, its process, and the HTTP answers that the broker cannot fence."""
