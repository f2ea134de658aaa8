"""The compiled kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race between threads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitizer_calls
import torch

CALLS = Path(__file__).with_name("sanitizer_calls.py")


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_the_calls_themselves(device, scheme):
    """They return valid ids without the sanitizer too; in the interpreter the smallest shapes are enough."""
    shapes = {} if device.type == "cuda" else {"shapes": ((2, 130, 8, 1),), "cut_shapes": ((2, 130, 8, 1),)}
    assert sanitizer_calls.main(torch.float32, scheme, device, **shapes) > 8


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["group", "token"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool, dtype, scheme):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, part of NVIDIA's CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--print-level", "info", sys.executable, str(CALLS), dtype, scheme]
    # each tensor an allocation of its own: inside PyTorch's pool an access past the end would go unseen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(CALLS.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    said = done.stdout + done.stderr
    assert "calls returned valid ids" in said and re.search(r"SUMMARY: 0 (errors|hazards)", said), said[-4000:]
