"""What is measured: one module an area, each with a function ``cases()``."""
