"""Pages of the caches: which blocks there are, who holds them, where else they are kept."""
