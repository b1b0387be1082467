"""Evaluation: the measures of ``dsa-eval`` for how good a compiled model is.

Each measure is a function of a model, its material and nothing else, and returns frozen rows;
``suite`` runs them over artifacts, ``results`` keeps them, ``tables`` and ``plot`` show them.
"""
