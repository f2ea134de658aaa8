"""The LM head's matmul alone: the yardstick, not a sampler."""

from fmms.backends.registry import register


@register(
    "matmul", about="hidden @ weight.T alone, the logits in the dtype of the weight", returns="logits", graph=True
)
def matmul(hidden, weight, temperature, seeds):
    return hidden @ weight.T
