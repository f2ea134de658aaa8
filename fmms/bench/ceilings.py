"""What a device can do at best with PyTorch: copy and read bandwidth, matmul rate, and the LM head's matmul alone.

These are the yardsticks for every later measurement on the same machine. Each operation is checked on the very data
that is then timed; random data, because zeros switch fewer transistors and let a GPU clock higher. Timing itself is
fmms.bench.timing.
"""

from pathlib import Path

import torch

from fmms.bench import records, timing

# LM heads [V, D] of known models, smallest first.
HEADS = {
    "SmolLM2-135M": (49152, 576),
    "DeepSeek-V2-Lite": (102400, 2048),
    "Llama-3.1-8B": (128256, 4096),
    "Qwen3-8B": (151936, 4096),
}
_ROW = 4096
_PAST_CACHE = 4  # a buffer of so many times the last-level cache cannot be served from it


def measure(
    device: torch.device | str, dtype: torch.dtype, buffer_bytes: int, matmul_size: int, n: int = 20
) -> list[dict]:
    """Copy bandwidth, read bandwidth and matmul rate of one device, one row each.

    Args:
        device: "cpu" or a CUDA (or ROCm) GPU.
        dtype: of the matmul: float32 (IEEE), bfloat16 or float16.
        buffer_bytes: size of the buffer that is copied and read; the copy needs it twice.
        matmul_size: N of the matmul [N, N] @ [N, N].
        n: timed calls of each.

    Returns:
        Rows with quantity, unit, median, p20, p80, n, dtype, size, times_cache (buffer over last-level cache, None
        where that is unknown), method, device.

    Raises:
        ValueError: no such device here, or a buffer that a GPU's cache could serve.
        AssertionError: an operation gave a wrong result; nothing is timed then.
    """
    device = _device(device)
    return [
        copy_bandwidth(device, buffer_bytes, n),
        read_bandwidth(device, buffer_bytes, n),
        matmul_rate(device, dtype, matmul_size, n),
    ]


def copy_bandwidth(device: torch.device | str, buffer_bytes: int, n: int = 20) -> dict:
    """Bytes read plus bytes written per second of `target.copy_(source)`, in GB/s. Raises as `measure` does."""
    device = _device(device)
    source = _random_buffer(device, buffer_bytes)
    target = torch.full_like(source, torch.nan)
    target.copy_(source)
    _check(torch.equal(source, target), "the copy of a buffer differs from its source")
    seconds = timing.time_call(lambda: target.copy_(source), device, n)
    moved = 2 * source.numel() * 4
    what = "target.copy_(source), bytes read + bytes written"
    return _row("copy bandwidth", "GB/s", moved / seconds / 1e9, "float32", _mib(source), device, what, source)


def read_bandwidth(device: torch.device | str, buffer_bytes: int, n: int = 20) -> dict:
    """Bytes per second of the faster of two reductions of a buffer, in GB/s. Raises as `measure` does.

    A sum, or one dot product per 4096 elements (a matrix-vector product): which comes closer to what the memory can do
    differs between devices and libraries. The method names the one that counted.
    """
    device = _device(device)
    source = _random_buffer(device, buffer_bytes)
    # In pieces, so that fp64 needs no second buffer.
    expected = sum(float(piece.double().sum()) for piece in source.split(1 << 24))
    found = float(source.sum())
    _check(abs(found - expected) <= 1e-4 * expected, f"the sum of a buffer is {found:g}, in fp64 {expected:g}")
    matrix, vector = source.view(-1, _ROW), _normal(_ROW, 1, source.dtype, device, 1)
    check_matmul(matrix @ vector, matrix, vector)
    reductions = {
        "source.sum()": source.sum,
        f"torch.mv(source.view(-1, {_ROW}), vector)": lambda: torch.mv(matrix, vector[:, 0]),
    }
    rates = {
        what: source.numel() * 4 / timing.time_call(reduce, device, n) / 1e9 for what, reduce in reductions.items()
    }
    best = max(rates, key=lambda what: timing.quantiles(rates[what])["median"])
    what = f"{best} (the faster of {len(rates)} reductions), bytes read"
    return _row("read bandwidth", "GB/s", rates[best], "float32", _mib(source), device, what, source)


def matmul_rate(device: torch.device | str, dtype: torch.dtype, size: int, n: int = 20) -> dict:
    """Rate of `[size, size] @ [size, size]` in TFLOP/s, 2 size^3 operations each. Raises as `measure` does."""
    device = _device(device)
    a, b = (_normal(size, size, dtype, device, seed) for seed in (1, 2))
    out = torch.full((size, size), torch.nan, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    check_matmul(out, a, b)
    seconds = timing.time_call(lambda: torch.mm(a, b, out=out), device, n)
    rate = 2 * size**3 / seconds / 1e12
    return _row("matmul rate", "TFLOP/s", rate, _name(dtype), f"{size} x {size} x {size}", device, "torch.mm(a, b)")


def head_matmul(
    device: torch.device | str, dtype: torch.dtype, vocab: int, width: int, rows: int = 1, n: int = 20
) -> dict:
    """Time of `hidden [rows, width] @ weight [vocab, width].T`, in microseconds, with the weight out of the caches.

    Raises as `measure` does.
    """
    device = _device(device)
    hidden, weight = _normal(rows, width, dtype, device, 1), _normal(vocab, width, dtype, device, 2)
    out = torch.full((rows, vocab), torch.nan, dtype=dtype, device=device)
    torch.mm(hidden, weight.T, out=out)
    check_matmul(out, hidden, weight.T)
    evicting = torch.empty(_PAST_CACHE * (cache_bytes(device) or 1 << 26), dtype=torch.uint8, device=device)
    seconds = timing.time_call(lambda: torch.mm(hidden, weight.T, out=out), device, n, before=lambda: evicting.fill_(1))
    size, what = f"[{rows}, {width}] @ [{vocab}, {width}].T", "torch.mm(hidden, weight.T), caches evicted before each"
    return _row("LM-head matmul", "us", seconds * 1e6, _name(dtype), size, device, what, weight)


def read_floors(read: dict, dtype: torch.dtype, heads: dict[str, tuple[int, int]] = HEADS) -> list[dict]:
    """The time to read each LM head once at a measured read bandwidth: no decode step's last mile is shorter.

    read: the row of `read_bandwidth`; its quantiles become those of the time, so p20 belongs to its p80.

    Returns:
        Rows with head, V, D, dtype, weight_mb (1e6 bytes), floor_us, floor_p20_us, floor_p80_us.
    """
    rows = []
    for head, (vocab, width) in heads.items():
        size = vocab * width * dtype.itemsize
        floors = {
            "floor_us": read["median"],
            "floor_p20_us": read["p80"],
            "floor_p80_us": read["p20"],
        }
        times = {name: size / (rate * 1e9) * 1e6 for name, rate in floors.items()}
        rows.append({"head": head, "V": vocab, "D": width, "dtype": _name(dtype), "weight_mb": size / 1e6, **times})
    return rows


def check_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, entries: int = 64) -> None:
    """Compares a few entries of `out = a @ b` with fp64.

    The bound allows one rounding to the result's dtype (two where partial sums are rounded) and fp32 accumulation;
    float32 that went through TF32 exceeds it. Raises AssertionError with the largest excess.
    """
    generator = torch.Generator().manual_seed(3)
    i = torch.randint(out.shape[0], (entries,), generator=generator).to(out.device)
    j = torch.randint(out.shape[1], (entries,), generator=generator).to(out.device)
    left, right = a[i].double(), b[:, j].double().T
    products = left * right
    exact, magnitude = products.sum(-1), products.abs().sum(-1)
    spread = left.norm(dim=-1) * right.norm(dim=-1) / a.shape[1] ** 0.5
    bound = torch.finfo(out.dtype).eps * (exact.abs() + 2 * spread) + 4 * torch.finfo(torch.float32).eps * magnitude
    excess = (out[i, j].double() - exact).abs() / bound
    # Written so that a NaN fails too.
    _check(bool((excess <= 1).all()), f"a matmul in {_name(a.dtype)} is off by {float(excess.max()):.3g} of its bound")


def cache_bytes(device: torch.device | str) -> int | None:
    """Size of the device's last-level cache; None where the system doesn't tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        sizes = [(caches[-1] / "size").read_text(encoding="ascii").strip()] if caches else []
        return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=None)
    except (OSError, ValueError, KeyError):
        return None


def device_name(device: torch.device | str) -> str:
    """What the hardware is called."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else records.cpu_model()


def _device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    timing.method(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch finds no GPU here; use device 'cpu' (profile cpu)")
    return device


def _random_buffer(device: torch.device, size: int) -> torch.Tensor:
    """float32 in [0, 1) of `size` bytes, less what does not fill a row."""
    cache = cache_bytes(device)
    if device.type == "cuda" and cache and size < _PAST_CACHE * cache:
        raise ValueError(
            f"buffer_bytes is {size}, but the GPU's L2 cache holds {cache}; expected at least {_PAST_CACHE * cache}"
        )
    if size < 4 * _ROW:
        raise ValueError(f"buffer_bytes is {size}; expected at least {4 * _ROW}")
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(size // (4 * _ROW) * _ROW, dtype=torch.float32, device=device, generator=generator)


def _normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)


def _row(quantity, unit, values, dtype, size, device, what, buffer: torch.Tensor | None = None) -> dict:
    cache = cache_bytes(device)
    known = buffer is not None and cache
    return {
        "quantity": quantity,
        "unit": unit,
        **timing.quantiles(values),
        "dtype": dtype,
        "size": size,
        "times_cache": buffer.numel() * buffer.element_size() / cache if known else None,
        "method": f"{what}; {timing.method(device)}",
        "device": device_name(device),
    }


def _check(correct: bool, fault: str) -> None:
    # Not an assert statement, which python -O removes.
    if not correct:
        raise AssertionError(f"{fault}; not timed")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mib(buffer: torch.Tensor) -> str:
    return f"{buffer.numel() * buffer.element_size() / 2**20:g} MiB"
