// AMD, gfx942. No unit copies in the background into shared memory with a barrier of its own, so the producer wave
// copies through registers, and gates are counters in shared memory. No barrier over a part of a block either.
#pragma once

#include <hip/hip_runtime.h>
#include <math.h>
#include <string.h>

#define MK_PRAGMA(text) _Pragma(#text)
#define MK_UNROLL(times) MK_PRAGMA(unroll times)
#define MK_DEVICE __device__ __forceinline__
#define MK_CALL MK_DEVICE
#define MK_KERNEL extern "C" __global__ void __launch_bounds__(mk::THREADS, 1)
#define MK_PARAMS const mk::Params
#define MK_SHARED static __shared__ Shared shared_bytes; return shared_bytes
#define MK_SHARED_AT_LAUNCH 0

namespace mk {

constexpr int WAVE = 64;
constexpr int SHARED_LIMIT = 64 * 1024 - 4;  // without the counter of consumer_sync
constexpr int THREADS = (CONSUMER_WAVES + 1) * WAVE;

MK_DEVICE int thread() { return (int)threadIdx.x; }
MK_DEVICE int block() { return (int)blockIdx.x; }

template <class T>
MK_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor(value, mask, WAVE);
}

template <class T>
MK_DEVICE T shuffle_first(T value) {
  return __shfl(value, 0, WAVE);
}

MK_DEVICE void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
MK_DEVICE uint64_t wave_votes(bool value) { return __ballot(value); }
MK_DEVICE int count_ones(uint64_t votes) { return __popcll(votes); }
MK_DEVICE void block_sync() { __syncthreads(); }

MK_DEVICE uint32_t* consumer_arrivals() {
  __shared__ uint32_t arrivals;
  return &arrivals;
}
// By one thread, before a block_sync.
MK_DEVICE void consumer_sync_init() { *consumer_arrivals() = 0; }
MK_DEVICE void consumer_sync() {
  wave_sync();
  if (thread() % WAVE == 0) {
    uint32_t* p = consumer_arrivals();
    uint32_t before = __hip_atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP);
    uint32_t all = (before / CONSUMER_WAVES + 1) * CONSUMER_WAVES;
    while ((int32_t)(__hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP) - all) < 0)
      __builtin_amdgcn_s_sleep(0);
  }
  wave_sync();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

MK_DEVICE uint32_t load_relaxed(const uint32_t* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
MK_DEVICE uint64_t load_relaxed(const uint64_t* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
MK_DEVICE Vec16 load_relaxed(const Vec16* p) {
  Vec16 value;
  for (int i = 0; i < 4; ++i) value.word[i] = load_relaxed(&p->word[i]);
  return value;
}
MK_DEVICE uint32_t load_acquire(const uint32_t* p) { return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT); }
MK_DEVICE uint64_t load_acquire(const uint64_t* p) { return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT); }
MK_DEVICE void store_relaxed(uint32_t* p, uint32_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE void store_relaxed(uint64_t* p, uint64_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE void store_release(uint64_t* p, uint64_t value) {
  __hip_atomic_store(p, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE uint32_t add_relaxed(uint32_t* p, uint32_t value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE void count_relaxed(uint32_t* p) { add_relaxed(p, 1); }
MK_DEVICE void add_release(uint32_t* p, uint32_t value) {
  __hip_atomic_fetch_add(p, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

// The acquire has emptied this unit's cache of what it could hold of other blocks' data.
template <class T>
MK_DEVICE T fresh(const T* p) {
  return *p;
}

// There is no instruction for it.
MK_DEVICE void bring_near(const void*) {}
MK_DEVICE Vec16 load_vector(const void* p) { return *(const Vec16*)p; }
MK_DEVICE void store_vector(void* p, const Vec16& value) { *(Vec16*)p = value; }

struct alignas(8) Gate {
  uint32_t arrivals;  // since the beginning
  uint32_t needed;    // for one phase
};

MK_DEVICE void gate_init(Gate* g, int arrivals) {
  g->arrivals = 0;
  g->needed = (uint32_t)arrivals;
}
MK_DEVICE void gates_ready() {}
MK_DEVICE void gate_arrive(Gate* g) {
  __hip_atomic_fetch_add(&g->arrivals, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP);
}
constexpr bool LANES_COPY = false;
MK_DEVICE void gate_expect(Gate*, int) {}
// The producer's own copies are what there is to wait for, so the arrival comes after them.
MK_DEVICE void gate_copied(Gate* g) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  if (thread() % WAVE == 0) gate_arrive(g);
}
MK_DEVICE void copy_async(void* shared, const void* global, int bytes, Gate*) {
  typedef uint32_t Piece __attribute__((ext_vector_type(4)));
  const Piece* from = (const Piece*)global;
  Piece* to = (Piece*)shared;
  for (int i = thread() % WAVE; i < bytes / (int)sizeof(Piece); i += WAVE) to[i] = __builtin_nontemporal_load(from + i);
}
MK_DEVICE bool gate_try_wait(Gate* g, int odd) {
  uint32_t phases = __hip_atomic_load(&g->arrivals, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP) / g->needed;
  return (int)(phases & 1u) != odd;
}
MK_DEVICE void copies_after_stores() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
MK_DEVICE bool gate_test(Gate* g, int odd) { return gate_try_wait(g, odd); }
MK_DEVICE void rest() { __builtin_amdgcn_s_sleep(1); }
MK_DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }
MK_DEVICE int64_t nanoseconds() { return (int64_t)__builtin_amdgcn_s_memrealtime() * 10; }  // it runs at 100 MHz

}  // namespace mk
