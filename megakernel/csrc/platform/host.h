// The host: every thread of every block is a fibre, and one operating-system thread runs them in an order that a seed
// decides. Shuffles and barriers are points where fibres meet, asynchronous copies arrive at some later time, and the
// memory that they write to holds NaN until then, so that whatever reads too early shows.
#pragma once

#include <math.h>
#include <string.h>

#define MK_DEVICE inline
#define MK_CALL inline
#define MK_SHARED return *(Shared*)host::shared_bytes()
#define MK_UNROLL(times)

namespace mk {

constexpr int WAVE = HOST_WAVE;
constexpr int SHARED_LIMIT = 1 << 30;
constexpr int THREADS = (CONSUMER_WAVES + 1) * WAVE;

namespace host {

// Of the fibre that runs.
int thread_index();
int block_index();
void* shared_bytes();  // of its block
// Waits until all threads of a group are here: one of the block's waves, its consumers, or all of it.
enum Group { ALL = -1, CONSUMERS = -2 };
void meet(int group);
// Leaves a word for the others of this wave, and takes that of another lane.
uint64_t exchange(uint64_t word, int lane);
void yield();
int64_t nanoseconds();

struct Gate {
  int needed, left, phase;
  int64_t bytes;
};
void arrive(Gate* g, int64_t bytes);
bool try_wait(Gate* g, int odd);
void copy(void* to, const void* from, int bytes, Gate* g);
void store_later(void* to, uint64_t value, int bytes);
void stores_arrive();  // those of this block

}  // namespace host

inline int thread() { return host::thread_index(); }
inline int block() { return host::block_index(); }

template <class T>
inline T shuffle(T value, int lane) {
  static_assert(sizeof(T) <= 8, "one word");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  word = host::exchange(word, lane);
  memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
inline T shuffle_xor(T value, int mask) {
  return shuffle(value, (thread() % WAVE) ^ mask);
}
template <class T>
inline T shuffle_first(T value) {
  return shuffle(value, 0);
}

inline uint64_t wave_votes(bool value) {
  uint64_t votes = (uint64_t)value << thread() % WAVE;
  for (int mask = WAVE / 2; mask; mask /= 2) votes |= shuffle_xor(votes, mask);
  return votes;
}
inline int count_ones(uint64_t votes) { return __builtin_popcountll(votes); }
inline void wave_sync() { host::meet(thread() / WAVE); }
inline void block_sync() { host::meet(host::ALL); }
inline void consumer_sync_init() {}
inline void consumer_sync() { host::meet(host::CONSUMERS); }

// One operating-system thread: plain accesses are atomic. Relaxed stores arrive at some later time, and not in order, but
// before anything that their block releases.
inline uint32_t load_relaxed(const uint32_t* p) { return *p; }
inline uint64_t load_relaxed(const uint64_t* p) { return *p; }
inline Vec16 load_relaxed(const Vec16* p) { return *p; }
inline uint32_t load_acquire(const uint32_t* p) { return *p; }
inline uint64_t load_acquire(const uint64_t* p) { return *p; }
inline void store_relaxed(uint32_t* p, uint32_t value) { host::store_later(p, value, sizeof value); }
inline void store_relaxed(uint64_t* p, uint64_t value) { host::store_later(p, value, sizeof value); }
inline void store_release(uint64_t* p, uint64_t value) {
  host::stores_arrive();
  *p = value;
}
inline uint32_t add_relaxed(uint32_t* p, uint32_t value) {
  uint32_t old = *p;
  *p = old + value;
  return old;
}
inline void count_relaxed(uint32_t* p) { ++*p; }
inline void add_release(uint32_t* p, uint32_t value) {
  host::stores_arrive();
  *p += value;
}
inline uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  host::stores_arrive();
  return add_relaxed(p, value);
}

template <class T>
inline T fresh(const T* p) {
  return *p;
}

inline void bring_near(const void*) {}
inline Vec16 load_vector(const void* p) { return *(const Vec16*)p; }
inline void store_vector(void* p, const Vec16& value) { *(Vec16*)p = value; }

using host::Gate;

inline void gate_init(Gate* g, int arrivals) { *g = Gate{arrivals, arrivals, 0, 0}; }
inline void gates_ready() {}
inline void gate_arrive(Gate* g) { host::arrive(g, 0); }
constexpr bool LANES_COPY = WAVE == 32;  // as NVIDIA does; else as AMD does
inline bool copies() { return LANES_COPY || thread() % WAVE == 0; }
inline void gate_expect(Gate* g, int bytes) {
  if (copies()) host::arrive(g, bytes);
}
inline void gate_copied(Gate*) {}
inline bool gate_try_wait(Gate* g, int odd) { return host::try_wait(g, odd); }
inline void copy_async(void* shared, const void* global, int bytes, Gate* g) {
  if (copies()) host::copy(shared, global, bytes, g);
}
inline void copies_after_stores() {}
inline bool gate_test(Gate* g, int odd) { return g->phase != odd; }
inline void rest() { host::yield(); }
inline void pause() { host::yield(); }
inline int64_t nanoseconds() { return host::nanoseconds(); }

}  // namespace mk
