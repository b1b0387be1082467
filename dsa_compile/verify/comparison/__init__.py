"""Comparing values, calls and graphs of two stages."""
