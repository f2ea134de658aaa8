"""`torch.multinomial` on the softmax of stored logits: what most people write."""

import torch

from fmms.backends.registry import register


# Not for graphs: torch.multinomial checks its input on the host, which waits for the device.
@register("torch-multinomial", about="logits stored, fp32 softmax(logits / T), torch.multinomial")
def multinomial(hidden, weight, temperature, seeds):
    probabilities = torch.softmax((hidden @ weight.T).float().div_(temperature[:, None]), -1)
    return torch.multinomial(probabilities, 1)[:, 0]
