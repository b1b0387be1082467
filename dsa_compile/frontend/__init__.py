"""Export of a Hugging Face configuration to a program.

The package imports transformers, as evaluation and debugging do for their reference; the runtime
imports none of these.
"""
