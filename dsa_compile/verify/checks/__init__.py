"""``verify``: every rewrite checked where it was made."""
