"""Run state folded from the ledger, scheduling, and what is issued: the decisions of curriculum and evaluator."""
