"""Builders of small models and checkpoints for tests and benchmarks; needs transformers."""
