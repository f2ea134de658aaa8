"""Checks of what a caller passes to `fmms.sample`, and the messages that say what was expected.

Only what is known without reading a tensor is checked here: shapes, dtypes, devices, Python scalars. What only the
data can tell is flagged per row on the device (`valid`), since reading it would stop the GPU at every step.
"""

import numbers

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_VOCAB = 2**31 - 2**13
"""Token ids are int32 inside the kernels, with room for one tile past the end."""


def describe(value) -> str:
    """Shape, dtype and device of a tensor, or the value itself, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def fail(name: str, expected: str, value) -> None:
    raise ValueError(f"{name}: expected {expected}, got {describe(value)}")


def check_problem(hidden, weight) -> None:
    """hidden [H, D] and weight [V, D]: same dtype, same device, V and D at least 1."""
    for name, value, layout in (("hidden", hidden, "[H, D]"), ("weight", weight, "[V, D]")):
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            fail(name, f"a tensor {layout}", value)
        if value.dtype not in DTYPES or value.layout != torch.strided:
            fail(name, f"a dense tensor {layout} of dtype bfloat16, float16 or float32", value)
    if weight.shape[0] < 1 or weight.shape[0] > MAX_VOCAB:
        fail("weight", f"a vocabulary V from 1 to {MAX_VOCAB}", weight)
    if weight.shape[1] < 1:
        fail("weight", "a width D of at least 1", weight)
    if hidden.shape[1] != weight.shape[1]:
        fail("hidden", f"the width D = {weight.shape[1]} of weight", hidden)
    if hidden.dtype != weight.dtype:
        fail("hidden", f"the dtype of weight, {weight.dtype}", hidden)
    if hidden.device != weight.device:
        fail("hidden", f"the device of weight, {weight.device}", hidden)
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        fail("weight", "rows that are contiguous along D (call .contiguous() once, outside the decode loop)", weight)


def check_row_tensor(name: str, value, rows: int, device, dtypes: tuple, scalar_ok: bool = True) -> torch.Tensor:
    """A per-row control: shape [H] (or [] for all rows alike) on the device of hidden."""
    shapes = f"[{rows}]" + (" or []" if scalar_ok else "")
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if not (value.shape == (rows,) or (scalar_ok and value.dim() == 0)):
        fail(name, f"a tensor of shape {shapes}, one value per row", value)
    if value.dtype not in dtypes or value.layout != torch.strided:
        fail(name, f"a dense tensor of dtype {names}", value)
    if value.device != device:
        fail(name, f"a tensor on the device of hidden, {device}", value)
    return value.expand(rows).contiguous()


def check_top_k(value, rows: int, device) -> tuple[torch.Tensor | None, int]:
    """(int32 [H] or None, scalar), 0 = off."""
    if value is None:
        return None, 0
    if isinstance(value, torch.Tensor):
        tensor = check_row_tensor("top_k", value, rows, device, (torch.int32, torch.int64))
        return tensor.clamp(-2, 2**31 - 1).to(torch.int32), 0
    expected = "None, an int >= 1 (0 or -1: off), or an integer tensor [H]"
    return None, min(check_integer("top_k", value, -1, 2**63, expected), 2**31 - 1)


def check_share(name: str, value, rows: int, device, off: float) -> tuple[torch.Tensor | None, float]:
    """(fp32 [H] or None, scalar) of `top_p` or `min_p`, a number in [0, 1]."""
    if value is None:
        return None, off
    if isinstance(value, torch.Tensor):
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return check_row_tensor(name, value, rows, device, dtypes).to(torch.float32), off
    value = check_number(name, value, "None, a number from 0 to 1, or a float tensor [H]")
    if not 0 <= value <= 1:
        fail(name, f"a number from 0 to 1 ({off:g} = off)", value)
    return None, value


def check_triple(name: str, value, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows int64, tokens int64, values fp32), [N] each."""
    expected = "a triple (rows, tokens, values) of tensors [N]"
    if not isinstance(value, (tuple, list)) or len(value) != 3 or not all(isinstance(v, torch.Tensor) for v in value):
        fail(name, expected, value)
    for part, what in zip(value, ("rows", "tokens", "values"), strict=True):
        if part.dim() != 1 or part.shape != value[0].shape:
            fail(f"{name} ({what})", f"{expected}, of equal length", part)
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        dtypes = dtypes if what == "values" else (torch.int64, torch.int32)
        if part.dtype not in dtypes or part.layout != torch.strided:
            names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            fail(f"{name} ({what})", f"a dense tensor of dtype {names}", part)
        if part.device != device:
            fail(f"{name} ({what})", f"a tensor on the device of hidden, {device}", part)
    rows, tokens, values = value
    return rows.to(torch.int64), tokens.to(torch.int64), values.to(torch.float32)


def check_allowed_mask(value, rows: int, vocab: int, device) -> torch.Tensor:
    """int32 [H, at least ceil(V / 32)], contiguous along the words."""
    words = -(-vocab // 32)
    expected = (
        f"an int32 tensor [{rows}, {words}], one bit per token (fmms.pack_mask makes it of a bool [H, V]), or None"
    )
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int32 or value.dim() != 2:
        fail("allowed_mask", expected, value)
    if value.layout != torch.strided:
        fail("allowed_mask", "a dense tensor", value)
    if value.shape[0] != rows or value.shape[1] < words:
        fail("allowed_mask", expected, value)
    if value.device != device:
        fail("allowed_mask", f"a tensor on the device of hidden, {device}", value)
    return value if value.stride(1) == 1 else value.contiguous()


def check_banned_ids(value, rows: int, device) -> torch.Tensor:
    """int64 [H]."""
    if not isinstance(value, torch.Tensor):
        fail("banned_ids", f"an integer tensor [{rows}], a token per row or -1, or None", value)
    tensor = check_row_tensor("banned_ids", value, rows, device, (torch.int64, torch.int32), scalar_ok=False)
    return tensor.to(torch.int64)


def check_temperature(value, rows: int, device) -> tuple[torch.Tensor | None, float]:
    """(fp32 [H] or None, scalar): a tensor control, or a Python number that holds for every row."""
    if isinstance(value, torch.Tensor):
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return check_row_tensor("temperature", value, rows, device, dtypes).to(torch.float32), 0.0
    value = check_number("temperature", value, "a number >= 0 (0 = greedy), or a float tensor [H]")
    if not value >= 0:
        fail("temperature", "a number >= 0 (0 = greedy)", value)
    # temperatures are fp32; above its range they are all infinitely hot
    return None, min(value, torch.finfo(torch.float32).max)


def check_number(name: str, value, expected: str = "a number") -> float:
    """A Python or NumPy number (no bool, no tensor) as a float."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, numbers.Real):
        fail(name, expected, value)
    try:
        return float(value)
    except OverflowError:
        fail(name, expected, value)


def check_integer(name: str, value, low: int, high: int, expected: str) -> int:
    """A Python or NumPy integer (no bool, no tensor) from low to high."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, numbers.Integral) or not low <= value <= high:
        fail(name, expected, value)
    return int(value)


def check_fp32(name: str, value, positive: bool = False) -> float:
    """A number that fp32, in which the kernels compute, holds as a finite one; positive ones as normal ones too."""
    limits = torch.finfo(torch.float32)
    expected = (
        f"a number from {limits.tiny:.3g} to {limits.max:.3g}" if positive else f"a number within {limits.max:.3g}"
    )
    number = check_number(name, value, f"{expected}, or None")
    if not (limits.tiny <= number if positive else True) or not abs(number) <= limits.max:
        fail(name, f"{expected}, or None", value)
    return number


def check_seed(value, rows: int, device) -> tuple[torch.Tensor | None, int]:
    """(int64 [H] or None, scalar). None draws one fresh seed per row from PyTorch's generator of the device."""
    if value is None:
        return torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64, device=device), 0
    if isinstance(value, torch.Tensor):
        # no [] here: one key for all rows would repeat the noise from row to row
        return check_row_tensor("seed", value, rows, device, (torch.int64,), scalar_ok=False), 0
    expected = "None, an int in [-2**63, 2**64), or an int64 tensor [H]"
    value = check_integer("seed", value, -(2**63), 2**64 - 1, expected)
    return None, value if value < 2**63 else value - 2**64


def check_position(value, rows: int, device) -> tuple[torch.Tensor | None, int]:
    """(int64 [H] or None, scalar)."""
    if isinstance(value, torch.Tensor):
        return check_row_tensor("position", value, rows, device, (torch.int64, torch.int32)).to(torch.int64), 0
    return None, check_integer("position", value, -(2**63), 2**63 - 1, "an int64 number or an integer tensor [H]")


def check_flag(name: str, value) -> bool:
    if not isinstance(value, bool):
        fail(name, "True or False", value)
    return value


def check_count(name: str, value, low: int, high: int) -> int:
    return check_integer(name, value, low, high, f"an int from {low} to {high}")


def check_bias(value, vocab: int, device) -> torch.Tensor:
    """bias [V], any of the supported dtypes, contiguous."""
    if not isinstance(value, torch.Tensor) or value.shape != (vocab,) or value.dtype not in DTYPES:
        fail("bias", f"a bfloat16, float16 or float32 tensor of shape [{vocab}], or None", value)
    if value.device != device:
        fail("bias", f"a tensor on the device of hidden, {device}", value)
    return value.contiguous()


def check_noise(value, scheme: str, shape: tuple[int, int, int], device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Injected noise of the given shape: Gumbels for `token`, Gumbels and uniforms for `group`; float32 or float64, the
    uniforms also int64 (the 64 bits of x)."""
    parts = (value,) if isinstance(value, torch.Tensor) else value
    wanted = 1 if scheme == "token" else 2
    layout = "Gumbels [H, S, V]" if scheme == "token" else "a pair (Gumbels, uniforms), each [H, S, G]"
    if not isinstance(parts, (tuple, list)) or len(parts) != wanted:
        fail("noise", f"{layout} for noise_scheme={scheme!r}", value)
    for part, whole_bits in zip(parts, (False, True), strict=False):
        if not isinstance(part, torch.Tensor) or part.shape != shape:
            fail("noise", f"{layout} = {list(shape)}", part)
        dtypes = (torch.float32, torch.float64, torch.int64)[: 3 if whole_bits else 2]
        if part.dtype not in dtypes or part.device != device:
            fail("noise", f"float32 or float64 (uniforms: or int64) on {device}", part)
    return parts[0].contiguous(), parts[1].contiguous() if wanted == 2 else None
