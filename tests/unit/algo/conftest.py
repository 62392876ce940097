"""One torch thread: the last bit of a sum must not depend on the machine's cores."""

import torch

torch.set_num_threads(1)
