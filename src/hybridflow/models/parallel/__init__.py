"""A model cut among ranks: its layers by tensors, experts, stages, and its tokens by sequence."""
