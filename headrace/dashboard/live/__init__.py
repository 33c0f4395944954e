"""The live page of a run: its static files, its process, and HTTP answers with records that the broker cannot restrict."""
