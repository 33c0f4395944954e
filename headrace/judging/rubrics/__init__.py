"""Rubric judges: criteria, a model at an OpenAI-compatible endpoint that decides on them, and the judge's card."""
