"""Gradients: buffers and states, averages over ranks, and what user code sees and edits of them."""
