"""The product beside training: the key of its gateway, and users that are simulated."""
