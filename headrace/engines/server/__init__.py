"""Engines over an HTTP server: everything that does not depend on which server it is."""
