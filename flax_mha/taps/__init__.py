"""Named tensors of a running model: their edits, and the values that are read of them."""
