"""Linear layers whose weights oneDNN keeps in its own layout: small passes on a CPU cost half.

A matrix product of 2 … 32 rows is bound by reading the weights, and a kernel that first reorders
them reads them several times. With the order done once, verifying eight nodes costs little more
than one token, which is what speculative decoding needs. ``torch.compile`` does the same when it
freezes a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

TYPICAL_ROWS = 8
"""Rows of a product for which oneDNN chooses the layout."""
TOLERANCE = 1e-4


class PackedLinear(nn.Module):
    """An ``nn.Linear`` of float32 on a CPU, for inference, with its weight in oneDNN's layout."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed.to_dense()


def can_pack(model: Any) -> bool:
    """Tell whether this build of torch packs weights, and rightly, for such a model here."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    ):
        return False
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        linear = nn.Linear(48, 32)
        x = torch.randn(5, 48)
        expected = linear(x)
        return bool((PackedLinear(linear)(x) - expected).abs().max() < TOLERANCE)


def pack_linears(model: Any) -> int:
    """Replace every ``nn.Linear`` of a float32 model on a CPU in place; return how many."""
    if not can_pack(model):
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
                count += 1
    return count


def head_size(model: PreTrainedModel) -> int:
    """Return the columns of a model's logits."""
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", 0) or head.weight.shape[0])
