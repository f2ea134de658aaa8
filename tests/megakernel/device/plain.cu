// Within every limit: shared memory, a shuffle, an atomic.
#include "portable.h"

extern "C" __global__ void __launch_bounds__(256) plain(float* out, const float* in) {
  __shared__ float line[256];
  line[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float value = line[255 - threadIdx.x];
#ifdef __HIP__
  value += __shfl_xor(value, 16);
#else
  value += __shfl_xor_sync(0xffffffffu, value, 16);
#endif
  atomicAdd(out, value);
}

template <int N>
__global__ void second(int* out) {
  extern __shared__ int scratch[];
  scratch[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = scratch[(threadIdx.x + N) % 32];
}

template __global__ void second<3>(int*);

#ifdef AT_LAUNCH
__device__ __attribute__((used)) char compile_check_at_launch[AT_LAUNCH + 1];
#endif
