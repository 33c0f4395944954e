"""A production engine: a vLLM server over HTTP."""
