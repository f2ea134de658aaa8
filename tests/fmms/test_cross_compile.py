"""A kernel of each kind compiles for both vendors from here; CI compiles all of them for all targets."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json
from fmms.kernels import cross_compile as c
kernels = list(c.variants())
for kernel, name, constants, types, options in (kernels[0], kernels[-1]):
    for target in ("sm_90", "gfx942"):
        compiled = c.compile_kernel(kernel, target, constants, types, **options)
        print(json.dumps([name, target, c.resources(compiled, target)]))
"""


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, env=env)


def test_kernels_compile_for_nvidia_and_amd():
    result = run("-c", SCRIPT)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 4
    assert all(found["shared_bytes"] > 0 for _, _, found in rows)


def test_unknown_target_and_interpreter_are_refused():
    result = run("-m", "fmms.kernels.cross_compile", "sm_3")
    assert result.returncode == 2 and "sm_3" in result.stderr and "gfx942" in result.stderr
    result = run("-m", "fmms.kernels.cross_compile", TRITON_INTERPRET="1")
    assert result.returncode == 2 and "TRITON_INTERPRET" in result.stderr
