"""Tenants of the gateway: their API keys and rate limits, and their access to the broker itself."""
