"""What an agent can do in a sandbox: one class per tool of `policy.schemas.TABLE`, all on the sandbox operations."""
