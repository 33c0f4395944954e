"""`headrace check`: finds problems that would prevent a run from starting, in two seconds and without torch."""
