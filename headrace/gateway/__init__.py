"""Parts of the gateway: sessions, dialects, keys, limits."""
