"""Where tokens come from: one protocol, an embedded torch engine, an SGLang client."""
