// What the device code needs of a machine, and nothing else. Three platforms implement it: CUDA, HIP, and the host,
// where each thread of a block is a fibre. Everything above this file is the same on all three.
//
//   WAVE                      threads that run in step: 32, or 64 on AMD
//   thread(), block()         index in the block, index of the block
//   shuffle_xor(v, mask)      the value of the thread of this wave whose lane is lane ^ mask; all of the wave call it
//   shuffle_first(v)          the value of lane 0 of this wave; all of the wave call it
//   wave_sync()               orders shared memory within a wave
//   block_sync()              all threads of the block
//   consumer_sync()           all threads of the block but the producer wave's
//   load_relaxed, store_relaxed, add_relaxed, load_acquire, store_release, add_acq_rel
//                             atomics between blocks, on words in global memory
//   fresh(pointer)            reads what another block wrote before an acquire of this block
//   Gate                      counts arrivals and bytes in shared memory and has phases (an mbarrier):
//     gate_init(g, n)         n arrivals complete a phase
//     gate_arrive(g)          one arrival
//     gate_expect(g, bytes)   the producer wave's one arrival, and this many bytes to come in the phase;
//     gate_copied(g)          after the copies that bring them
//     gate_try_wait(g, odd)   whether the phase of this parity is complete; may wait a little, may fail spuriously
//   copy_async(...)           global to shared memory, in multiples of 16 bytes; counts the bytes at a gate. Called by
//                             all threads of the producer wave with the same arguments.
//   copies_after_stores()     copies that this wave starts from here on see what an acquire has made visible to it
//   pause()                   in loops that poll
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

MK_DEVICE float rounded(float value) { return to_float(to_bf16(value)); }

}  // namespace mk
