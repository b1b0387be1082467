"""Helpers of every part that know nothing of models."""
