"""Names of the ways in which an evaluation lets a model choose keys; torch is not needed."""

SPARSE, DENSE = "sparse", "dense"
CONTROLS = ("random", "recent", "interleaved")
SELECTIONS = (SPARSE, DENSE, *CONTROLS)
