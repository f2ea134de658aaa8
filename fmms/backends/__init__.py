"""Samplers that can be compared with `fmms.sample`, all called alike; yours too, in three lines.

    from fmms import backends

    @backends.register("mine", about="softmax in fp32, then torch.multinomial")
    def mine(hidden, weight, temperature, seeds):
        probabilities = torch.softmax((hidden @ weight.T).float() / temperature[:, None], -1)
        return torch.multinomial(probabilities, 1)[:, 0]

`make("mine")(hidden, weight, temperature, seeds)` calls it, and so do the benchmarks once its name is among their
systems; there its draws are tested before it is timed.

A backend takes hidden [H, D], weight [V, D] (one dtype, one device), temperature fp32 [H] > 0 and seeds int64 [H]
(which it may ignore), and returns token ids [H] of an integer dtype; one registered with `returns="logits"` returns
[H, V]. Its registration says what else a caller must know: see `register`.

One file per peer. Optional libraries are looked up when a backend is probed or made, in lists of (module, attribute)
candidates, because those names move between releases; importing this package imports none of them.
"""

from fmms.backends.registry import Available, Backend, Unavailable, known, make, probe, register

# each registers its own
from fmms.backends import torch_matmul, fused, torch_multinomial, torch_gumbel, torch_compiled, flashinfer  # isort: skip

__all__ = ["Available", "Backend", "Unavailable", "known", "make", "probe", "register"]

_PEERS = (torch_matmul, fused, torch_multinomial, torch_gumbel, torch_compiled, flashinfer)
