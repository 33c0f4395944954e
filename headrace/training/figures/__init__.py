"""Figures of a step: where its time goes, and the work that is done in it."""
