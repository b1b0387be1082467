"""Several ranks that run one model together: a process each, children of the first."""
