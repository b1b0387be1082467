"""Endpoints, a file for each group."""
