"""The `container` backend: images of the store as containers, under the kernel of the host."""
