"""Sources of sampled tokens: one protocol, an embedded torch engine, an SGLang client."""
