"""The roof: starting a whole run on one machine, finding it again, and the commands that look at it.

Everything here imports the rooms below inside functions, so that the command line stays light.
"""
