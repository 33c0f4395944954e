"""The production engine: an SGLang server over HTTP."""
