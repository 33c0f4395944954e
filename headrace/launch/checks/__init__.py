"""`headrace check`: what would keep a run from starting, found in two seconds and without torch."""
