"""Hazards between streams, found again by what a region does when it runs."""
