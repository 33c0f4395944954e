"""QEMU microVMs: processes, clones, memory, channels, integrity."""
