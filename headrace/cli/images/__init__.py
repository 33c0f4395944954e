"""`headrace images`: the store of container images."""
