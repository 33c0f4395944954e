"""The slot agent: the code that runs inside a sandbox. It uses the standard library alone, because these files are
copied into the guest image as they are.

boot/init.py (root, pid 1 of the machine) opens the slots; agent.py (pid 1 of a slot) serves the slot's port;
testing/process.py runs tests.
"""
