"""`headrace config`: shows where the value of a configuration key comes from."""
