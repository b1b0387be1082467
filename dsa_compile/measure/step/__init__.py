"""Time of a compiled model's step on a GPU: per layer, by op, with passes left out."""
