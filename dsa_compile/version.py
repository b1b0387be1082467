"""The package version: one place, read by the build and written into every artifact."""

__version__ = "0.1.0"
