"""Rubric judges: criteria, a model at an OpenAI-compatible endpoint that finds them met or not, and its card."""
