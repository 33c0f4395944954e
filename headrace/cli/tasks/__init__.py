"""`headrace tasks`: makes, imports, certifies, shows and exports suites."""
