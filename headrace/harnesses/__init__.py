"""Programs of others that act in headrace's sandboxes: their commands, their bundles, and which group has which."""
