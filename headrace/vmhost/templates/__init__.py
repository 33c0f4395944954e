"""Templates: machines booted once and frozen, and their cache."""
