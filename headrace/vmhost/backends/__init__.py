"""Sandbox backends without virtual machines."""
