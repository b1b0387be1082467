"""Adapters: kernels of other libraries under the signatures of the ``dsa::`` ops."""
