"""Asks a server, or its source, which parts of SGLang's interface it has."""
