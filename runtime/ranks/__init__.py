"""Ranks that run one model together: a process each, started by the first or by ``torchrun``."""
