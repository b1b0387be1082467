"""How good a compiled model is: what ``dsa-eval`` measures, and how.

Each measure is a function of a model, its material and nothing else, and returns frozen rows;
``suite`` runs them over artifacts, ``results`` keeps them, ``tables`` and ``plot`` show them.
"""
