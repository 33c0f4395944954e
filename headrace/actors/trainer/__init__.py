"""The trainer actor: batches in the order of the closings, versions out."""
