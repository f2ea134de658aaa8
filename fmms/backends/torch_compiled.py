"""The exponential race under `torch.compile`: PyTorch fuses what follows its matmul."""

import torch

from fmms.backends.registry import register
from fmms.backends.torch_gumbel import gumbel_argmax


def _build():
    # one compilation for all shapes: a new one for each would pass PyTorch's recompilation limit
    return torch.compile(gumbel_argmax, dynamic=True)


register(
    "torch-gumbel-compiled",
    build=_build,
    about="torch-gumbel under torch.compile(dynamic=True); its first call compiles",
    graph=True,
)
