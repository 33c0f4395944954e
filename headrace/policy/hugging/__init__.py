"""The provider `transformers`: any causal language model of that library, in ordinary mode."""
