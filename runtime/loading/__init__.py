"""Loading of an artifact directory to a runner: weights, memory plan, caches."""
