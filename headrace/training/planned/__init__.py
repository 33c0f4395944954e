"""A trainer's step without values: its tensors have shapes and bytes, and no memory."""
