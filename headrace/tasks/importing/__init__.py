"""Suites from tasks that exist elsewhere: SWE-bench and SWE-smith rows, Harbor folders, plain JSONL."""
