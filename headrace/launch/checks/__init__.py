"""`headrace check`: finds problems that would keep a run from starting, in two seconds and without torch."""
