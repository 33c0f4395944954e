"""The decisions of curriculum and evaluator: run state folded from the ledger, scheduling, issued attempts."""
