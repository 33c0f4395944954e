"""The trainer actor: makes versions from batches, in the order of the closings."""
