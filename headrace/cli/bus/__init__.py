"""Commands for a broker that an operator runs: `headrace bus ...`."""
