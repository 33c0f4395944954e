"""What runs inside a sandbox. Standard library alone: these files are copied into the guest image as they are.

init (root, pid 1 of the machine) opens the slots; a keeper (pid 1 of a slot) serves its port; a worker runs tests.
"""
