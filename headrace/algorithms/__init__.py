"""Pure functions of reinforcement learning: advantages, losses, packing, staleness, rewards, mismatch.

Nothing here reads a clock, a file or a bus. Each module names the paper it follows and what it leaves out.
"""
