"""Plants the fault that ``DSA_PLANTED`` names in whatever Python process starts with this folder on
``PYTHONPATH``: those of ranks, and those that check kernels."""

import os

if name := os.environ.get("DSA_PLANTED"):
    from tests.planted_bugs.faults import fault_named

    fault_named(name).plant_here()
