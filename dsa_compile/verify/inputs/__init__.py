"""Inputs of a debugging run: prompts, weights, the reference model."""
