"""`headrace check`: finds problems that would prevent a run from starting, without starting a part."""
