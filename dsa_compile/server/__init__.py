"""An OpenAI-compatible server over an artifact: an HTTP process and an engine process.

The HTTP process owns text (tokenising, chat formats, stop strings, parsing) and imports no torch;
the engine process works in token ids. ``protocol`` has the messages between the two.
"""
