"""What is known before a graph: the model, the target, the recipe, the layout over ranks."""
