"""Settings of the whole suite."""

import torch

# The models are tiny: a second thread only waits, and the suite already runs one process a core.
torch.set_num_threads(1)
