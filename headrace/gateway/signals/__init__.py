"""The signals by which users rate sessions, and the publication of ratings."""
