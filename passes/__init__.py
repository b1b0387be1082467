"""Passes over the graphs of a program; ``pipeline.py`` is their order."""
