"""``bisect``: the one rewrite that makes a check fail."""
