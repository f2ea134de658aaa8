// 200 values live at once in a block so large that a thread gets 64 (NVIDIA) or 128 (AMD) registers.
#include "portable.h"

extern "C" __global__ void __launch_bounds__(1024) spills(float* out, const float* in, int rounds) {
  constexpr int N = 200;
  float a[N];
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = in[i * 1024 + threadIdx.x];
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = a[i] * a[(i + 7) % N] + in[r];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i * 1024 + threadIdx.x] = a[i];
}
