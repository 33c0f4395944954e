"""Folders of the repository that tests use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The root of the checkout."""
