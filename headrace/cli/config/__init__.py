"""`headrace config`: where the values of a configuration come from."""
