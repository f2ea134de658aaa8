// What the device code needs of a machine, and nothing else. Three platforms implement it: CUDA, HIP, and the host,
// where each thread of a block is a fibre. Everything above this file is the same on all three.
//
//   MK_DEVICE, MK_CALL        functions that are part of their caller, and functions that are called
//   MK_SHARED                 the body of shared(): what a block keeps in shared memory
//   WAVE                      threads that run in step: 32, or 64 on AMD
//   thread(), block()         index in the block, index of the block
//   shuffle_xor(v, mask)      the value of the thread of this wave whose lane is lane ^ mask; all of the wave call it
//   shuffle_first(v)          the value of lane 0 of this wave; all of the wave call it
//   wave_votes(v)             a bit for each thread of this wave in which it is true; all of the wave call it
//   count_ones(votes)         how many these are
//   wave_sync()               orders shared memory within a wave
//   block_sync()              all threads of the block
//   consumer_sync()           all threads of the block but the producer wave's
//   load_relaxed, store_relaxed, add_relaxed, load_acquire, store_release, add_release,
//   add_acq_rel
//                             atomics between blocks, on words in global memory
//   fresh(pointer)            reads what another block wrote before an acquire of this block
//   bring_near(pointer)       a hint: this line of memory will be read, and may well come nearer
//   load_vector, store_vector 16 bytes at once, which a compiler makes into more accesses if it is left to it
//   MK_MATRIX_UNIT            where it is defined: multiply_matrices(...) of a wave, and shuffle(v, lane) for any lane
//   Gate                      counts arrivals and bytes in shared memory and has phases (an mbarrier):
//     gate_init(g, n)         n arrivals complete a phase
//     gate_arrive(g)          one arrival
//     gate_expect(g, bytes)   the producer's one arrival, and this many bytes to come in the phase;
//     gate_copied(g)          after the copies that bring them
//     gate_test(g, odd)       whether the phase of this parity is complete
//     gate_try_wait(g, odd)   the same; may wait a little, may fail spuriously
//   copy_async(...)           global to shared memory, in multiples of 16 bytes; counts the bytes at a gate
//   LANES_COPY                whether gate_expect, copy_async and gate_copied are calls of single threads of the producer
//                             wave; otherwise they are the wave's, with the same arguments in all threads
//   copies_after_stores()     copies that this wave starts from here on see what an acquire has made visible to it
//   pause(), rest()           in loops that poll; in those that nobody waits for
//   nanoseconds()             of a clock that all blocks share
#pragma once

#include "abi.h"
#include "build_config.h"

namespace mk {

struct alignas(16) Vec16 {
  uint32_t word[4];
};

}  // namespace mk

#if defined(MK_HOST)
#include "platform/host.h"
#elif defined(__HIP_PLATFORM_AMD__)
#include "platform/amd.h"
#else
#include "platform/nvidia.h"
#endif

namespace mk {

typedef uint16_t bf16;  // as bits: vendor headers for bf16 differ between releases

MK_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

MK_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MK_DEVICE float to_float(bf16 value) { return bits_to_float((uint32_t)value << 16); }
MK_DEVICE float low_half(uint32_t pair) { return bits_to_float(pair << 16); }
MK_DEVICE float high_half(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

#if !defined(MK_CONVERTS)
// To nearest, ties to even; NaN stays NaN.
MK_DEVICE bf16 to_bf16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);
  return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#endif

MK_DEVICE float rounded(float value) { return to_float(to_bf16(value)); }

}  // namespace mk
