"""Tests of treegraft_core and pipeline."""

import torch

torch.set_num_threads(1)
