"""Commands that make, list and revoke the gateway's API keys."""
