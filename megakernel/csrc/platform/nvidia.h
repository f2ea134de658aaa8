// CUDA, compute capability 9.0: mbarriers and bulk copies.
#pragma once

#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

#define MK_PRAGMA(text) _Pragma(#text)
#define MK_UNROLL(times) MK_PRAGMA(unroll times)
#define MK_DEVICE __device__ __forceinline__
// What is called from several places, or seldom. A multiprocessor holds about 128 KB of instructions, and what a layer
// runs has to stay in there: most of it runs once for a task.
#define MK_CALL __device__ __noinline__
#define MK_KERNEL extern "C" __global__ void __launch_bounds__(mk::THREADS, 1)
#define MK_PARAMS const __grid_constant__ mk::Params
// More than 48 KB has to be asked for at the launch.
#define MK_SHARED extern __shared__ unsigned char shared_bytes[]; return *(Shared*)shared_bytes
#define MK_SHARED_AT_LAUNCH sizeof(mk::Shared)

namespace mk {

constexpr int WAVE = 32;
constexpr int SHARED_LIMIT = 227 * 1024;
constexpr int THREADS = (CONSUMER_WAVES + 1) * WAVE;

MK_DEVICE int thread() { return (int)threadIdx.x; }
MK_DEVICE int block() { return (int)blockIdx.x; }

template <class T>
MK_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

template <class T>
MK_DEVICE T shuffle_first(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

template <class T>
MK_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
MK_DEVICE uint64_t wave_votes(bool value) { return __ballot_sync(0xffffffffu, value); }
MK_DEVICE int count_ones(uint64_t votes) { return __popc((uint32_t)votes); }
MK_DEVICE void wave_sync() { __syncwarp(); }
MK_DEVICE void block_sync() { __syncthreads(); }
MK_DEVICE void consumer_sync_init() {}
MK_DEVICE void consumer_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_WAVES * WAVE) : "memory"); }

MK_DEVICE uint32_t load_relaxed(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MK_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MK_DEVICE uint64_t load_acquire(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
MK_DEVICE uint64_t load_relaxed(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
MK_DEVICE Vec16 load_relaxed(const Vec16* p) {
  Vec16 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(p)
               : "memory");
  return value;
}
MK_DEVICE void store_relaxed(uint32_t* p, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MK_DEVICE void store_relaxed(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
MK_DEVICE void store_release(uint64_t* p, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
MK_DEVICE uint32_t add_relaxed(uint32_t* p, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}
MK_DEVICE void count_relaxed(uint32_t* p) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
MK_DEVICE void add_release(uint32_t* p, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MK_DEVICE uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

#define MK_CONVERTS
// To nearest, ties to even; NaN stays NaN.
MK_DEVICE uint16_t to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#define MK_MATRIX_UNIT
// sums += a b: 16 x 16 by 16 x 8 in bf16, all spread over the wave as mma.m16n8k16 has them.
MK_DEVICE void multiply_matrices(float sums[4], const Vec16& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

template <class T>
MK_DEVICE T fresh(const T* p) {
  return __ldcg(p);
}
MK_DEVICE Vec16 fresh(const Vec16* p) {
  uint4 value = __ldcg((const uint4*)p);
  return Vec16{{value.x, value.y, value.z, value.w}};
}
MK_DEVICE void bring_near(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
MK_DEVICE Vec16 load_vector(const void* p) {
  uint4 value = *(const uint4*)p;
  return Vec16{{value.x, value.y, value.z, value.w}};
}
MK_DEVICE void store_vector(void* p, const Vec16& value) {
  *(uint4*)p = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}

MK_DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

struct alignas(8) Gate {
  uint64_t state;
};

MK_DEVICE void gate_init(Gate* g, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(g)), "r"(arrivals) : "memory");
}
// Makes initialised gates visible to the unit that copies.
MK_DEVICE void gates_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MK_DEVICE void gate_arrive(Gate* g) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(g)) : "memory");
}
constexpr bool LANES_COPY = true;
MK_DEVICE void gate_expect(Gate* g, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(g)), "r"(bytes) : "memory");
}
MK_DEVICE void gate_copied(Gate*) {}
MK_DEVICE bool gate_test(Gate* g, int odd) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(shared_address(g)), "r"(odd)
      : "memory");
  return complete;
}
MK_DEVICE bool gate_try_wait(Gate* g, int odd) {
  constexpr uint32_t NANOSECONDS = 1000;  // at most, so that a budget of polls is one of time
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(shared_address(g)), "r"(odd), "r"(NANOSECONDS)
      : "memory");
  return complete;
}
MK_DEVICE void copy_async(void* shared, const void* global, int bytes, Gate* g) {
  asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(g))
        : "memory");
}

// Stores and bulk copies go different ways to memory.
MK_DEVICE void copies_after_stores() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

MK_DEVICE void pause() {}
MK_DEVICE void rest() { __nanosleep(40); }
MK_DEVICE int64_t nanoseconds() {
  int64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

}  // namespace mk
