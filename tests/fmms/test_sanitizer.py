"""The compiled kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race between threads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("sanitizer_calls.py")


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
