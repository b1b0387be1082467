"""From a Hugging Face configuration to an exported program.

The only part of the project that imports transformers, and never imported by the runtime.
"""
