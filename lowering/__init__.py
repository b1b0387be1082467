"""Lowering of a program at the KERNEL level to an artifact for one target."""
