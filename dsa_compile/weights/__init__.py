"""Weights: where they are on disk, how a compiled model lays them out, and how they get there."""
