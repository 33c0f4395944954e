"""From the records of a batch to the tensors of a forward pass."""
