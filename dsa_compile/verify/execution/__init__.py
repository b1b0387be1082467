"""Running programs at any stage, and compilations again up to any rewrite."""
