"""The smallest kernel for which compute-sanitizer's racecheck reports what it reports for this package's stage 1.

    compute-sanitizer --tool racecheck python tests/racecheck_reproducer.py

A row maximum of a matmul tile is held by several threads at once. To store it, Triton changes its layout through shared
memory, and every holder writes its copy of the same value to the same address: a write-write hazard by racecheck's
rule, without an effect. There is nothing of this package in the kernel; docs/decisions.md has the finding.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def row_maximum(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.trans(tl.load(b + n[:, None] * K + k[None, :])))
    tl.store(out + m, tl.max(x, 1))


def main():
    for rows in (16, 64, 128):
        a = torch.randn(rows, 64, device="cuda").bfloat16()
        b = torch.randn(128, 64, device="cuda").bfloat16()
        out = torch.empty(rows, device="cuda")
        row_maximum[(1,)](a, b, out, rows, 128, 64, num_warps=8 if rows > 16 else 4)
        torch.testing.assert_close(out, (a.float() @ b.float().T).amax(1), rtol=1e-4, atol=1e-4)
    print("row maxima are right")


if __name__ == "__main__":
    main()
