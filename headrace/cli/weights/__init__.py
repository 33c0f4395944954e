"""Commands that work with the chain of published weight versions."""
