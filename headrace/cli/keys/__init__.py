"""Commands of the subject keys: API keys of the gateway."""
