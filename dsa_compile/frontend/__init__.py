"""From a Hugging Face configuration to an exported program.

Imports transformers, as evaluation and debugging do for their reference; the runtime imports none
of these.
"""
