"""GPU implementations of the ``dsa::`` ops.

``triton`` and ``cuda`` hold the project's own; ``peers`` presents other libraries' kernels with the
ops' signatures. :mod:`dsa_compile.kernels.registry` lists which implementation exists for what.
Importing this package imports neither triton nor CUDA's bindings.
"""
