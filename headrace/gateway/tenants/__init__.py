"""Tenants on the message bus: their API keys let them connect to the broker and send what they may send over HTTP."""
