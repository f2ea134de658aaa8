// What compute-sanitizer's racecheck makes of programs that are right: three pairs of the same work. The first of each pair
// is reported, the second is not; `BuildConfig.every_thread` makes the megakernel like the second ones.
//
//   nvcc -arch=sm_90a -o racecheck_limits racecheck_limits.cu
//   compute-sanitizer --tool racecheck ./racecheck_limits 0      0 to 5
#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int PIECES = 40, WORDS = 256, STAGES = 4, WAVE = 32;

__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void init(uint64_t* gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(gate)), "r"(arrivals) : "memory");
}
__device__ void arrive(uint64_t* gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(gate)) : "memory");
}
__device__ bool test(uint64_t* gate, int odd) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(address(gate)), "r"(odd)
      : "memory");
  return complete;
}
__device__ void wait(uint64_t* gate, int odd) {
  while (!test(gate, odd)) {
  }
}
__device__ void copy(int* stage, const int* from, uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full)), "r"(4 * WORDS) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(stage)),
      "l"(from), "r"(4 * WORDS), "r"(address(full))
      : "memory");
}

// A warp writes a record, another reads it. Either lane 0 arrives for its warp, or every lane does.
template <bool EVERY_LANE>
__global__ void records(const int* from, int* out) {
  __shared__ int record[2][WAVE];
  __shared__ uint64_t full[2], empty[2];
  const int lane = threadIdx.x % WAVE, warp = threadIdx.x / WAVE;
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; ++i) {
      init(&full[i], EVERY_LANE ? WAVE : 1);
      init(&empty[i], EVERY_LANE ? WAVE : 1);
    }
  __syncthreads();
  int sum = 0;
  for (int n = 0; n < PIECES; ++n) {
    const int stage = n % 2, round = n / 2;
    wait(warp == 0 ? &empty[stage] : &full[stage], warp == 0 ? (round + 1) & 1 : round & 1);
    __syncwarp();
    if (warp == 0)
      record[stage][lane] = from[WORDS * n + lane];
    else
      sum += record[stage][WAVE - 1 - lane];
    __syncwarp();
    if (EVERY_LANE || lane == 0) arrive(warp == 0 ? &full[stage] : &empty[stage]);
  }
  if (warp == 1) out[lane] = sum * (WORDS / WAVE);
}

// A lane copies, two warps read and meet at a barrier. Then one of them says that the stage is free, or both do.
template <bool BOTH>
__global__ void readers(const int* from, int* out) {
  __shared__ alignas(128) int ring[STAGES][WORDS];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int lane = threadIdx.x % WAVE, warp = threadIdx.x / WAVE;
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) {
      init(&full[i], 1);
      init(&empty[i], BOTH ? 2 * WAVE : WAVE);
    }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  int sum = 0;
  for (int n = 0; n < PIECES; ++n) {
    const int stage = n % STAGES, round = n / STAGES;
    if (warp == 0) {
      if (lane) continue;
      wait(&empty[stage], (round + 1) & 1);
      copy(ring[stage], from + WORDS * n, &full[stage]);
    } else {
      wait(&full[stage], round & 1);
      for (int i = threadIdx.x - WAVE; i < WORDS; i += 2 * WAVE) sum += ring[stage][i];
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (BOTH || warp == 1) arrive(&empty[stage]);
    }
  }
  if (warp) out[threadIdx.x - WAVE] = sum;
}

// A warp copies, another reads. Either there is a lane for each stage, or one lane for all.
template <bool ONE_LANE>
__global__ void lanes(const int* from, int* out) {
  __shared__ alignas(128) int ring[STAGES][WORDS];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int lane = threadIdx.x % WAVE, warp = threadIdx.x / WAVE;
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) {
      init(&full[i], 1);
      init(&empty[i], WAVE);
    }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (warp == 0 && ONE_LANE) {
    for (int n = 0; lane == 0 && n < PIECES; ++n) {
      wait(&empty[n % STAGES], (n / STAGES + 1) & 1);
      copy(ring[n % STAGES], from + WORDS * n, &full[n % STAGES]);
    }
  } else if (warp == 0) {
    const int stage = lane < STAGES ? lane : 0;
    int n = lane < STAGES ? lane : PIECES;
    while (__ballot_sync(~0u, n < PIECES))
      if (n < PIECES && test(&empty[stage], (n / STAGES + 1) & 1)) {
        copy(ring[stage], from + WORDS * n, &full[stage]);
        n += STAGES;
      }
  } else {
    int sum = 0;
    for (int n = 0; n < PIECES; ++n) {
      wait(&full[n % STAGES], n / STAGES & 1);
      for (int i = lane; i < WORDS; i += WAVE) sum += ring[n % STAGES][i];
      arrive(&empty[n % STAGES]);
    }
    out[lane] = sum;
  }
}

int main(int count, char** words) {
  static int ones[PIECES * WORDS], sums[2 * WAVE];
  for (int& one : ones) one = 1;
  int *from, *out, total = 0;
  cudaMalloc(&from, sizeof ones);
  cudaMalloc(&out, sizeof sums);
  cudaMemcpy(from, ones, sizeof ones, cudaMemcpyHostToDevice);
  cudaMemset(out, 0, sizeof sums);
  switch (count > 1 ? atoi(words[1]) : -1) {
    case 0: records<false><<<1, 2 * WAVE>>>(from, out); break;
    case 1: records<true><<<1, 2 * WAVE>>>(from, out); break;
    case 2: readers<false><<<1, 3 * WAVE>>>(from, out); break;
    case 3: readers<true><<<1, 3 * WAVE>>>(from, out); break;
    case 4: lanes<false><<<1, 2 * WAVE>>>(from, out); break;
    case 5: lanes<true><<<1, 2 * WAVE>>>(from, out); break;
    default: printf("expected one case, 0 to 5\n"); return 2;
  }
  cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
  for (int sum : sums) total += sum;
  printf("%s\n", total == PIECES * WORDS ? "right" : "wrong");
}
