// What a block keeps in shared memory.
#pragma once

#include "portable.h"

namespace mk {

constexpr int TEAM_WAVES = CONSUMER_WAVES / TEAMS;
constexpr int CONSUMERS = CONSUMER_WAVES * WAVE;
constexpr int AHEAD = 8;  // tasks that the producer may have begun before the consumers are done with the first

constexpr int HELD = 4;   // events of a task that the producer looks up for the consumers

static_assert(CONSUMER_WAVES % TEAMS == 0, "every team has as many waves");
static_assert(STAGES <= WAVE, "a lane of the producer for each stage");
static_assert(STAGES % TEAMS == 0, "a stage always belongs to the same team, or its phases would be missed");
static_assert((TEAM_WAVES & (TEAM_WAVES - 1)) == 0, "gates count phases in powers of two");
static_assert(STAGE_BYTES % 128 == 0, "stages are aligned");

// On the host, words after an array that show whether something wrote past it.
#if defined(MK_HOST)
#define MK_GUARD(name) uint64_t name[64];
#else
#define MK_GUARD(name)
#endif

struct Shared {
  alignas(128) unsigned char ring[STAGES][STAGE_BYTES];
  Gate full[STAGES], empty[STAGES];        // of the ring of weights
  Gate announced[AHEAD], finished[AHEAD];  // of the tasks
  Task task[AHEAD];
  Args args[AHEAD];
  int32_t number[AHEAD];     // of the task, -1: the launch is over
  int32_t iteration[AHEAD];
  int32_t waits[AHEAD][HELD], thresholds[AHEAD][HELD], triggers[AHEAD][HELD];  // the first events of each task
  alignas(16) bf16 x[X_ITEMS];  // input of a matrix product
  MK_GUARD(x_guard)
  alignas(16) float slots[SLOTS];  // its sums, by row and piece of the row
  MK_GUARD(slots_guard)
  alignas(16) float scratch[SCRATCH];
  MK_GUARD(scratch_guard)
  double doubles[CONSUMERS / 32 > 32 ? CONSUMERS / 32 : 32];
  float floats[CONSUMERS / 32];
  int32_t ints[CONSUMERS / 32];
  int32_t fired[8];  // events that this task was the last to count up
  int32_t fired_count;
  uint32_t dead;     // the launch was given up; what is computed from here on is not used
  uint32_t stop[3];  // `dead`, as the consumers agreed on it
  Params params;     // of the launch
};

// A function of its own, so that functions that are called know where it is without being told.
MK_DEVICE Shared& shared() { MK_SHARED; }

static_assert(sizeof(Shared) <= SHARED_LIMIT, "a block has no more shared memory: fewer or smaller stages");

MK_DEVICE int lane() { return thread() % WAVE; }
MK_DEVICE int wave() { return thread() / WAVE; }
MK_DEVICE bool producing() { return wave() == CONSUMER_WAVES; }

// ------------------------------------------------------------------------------------------------ sums and the like

MK_DEVICE float wave_sum(float value) {
  for (int mask = WAVE / 2; mask; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

MK_DEVICE float wave_max(float value) {
  for (int mask = WAVE / 2; mask; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

// Of all consumers; they all call it and all get it.
MK_DEVICE float consumer_sum(float value) {
  Shared& sh = shared();
  value = wave_sum(value);
  if (lane() == 0) sh.floats[wave()] = value;
  consumer_sync();
  float sum = 0;
  for (int i = 0; i < CONSUMER_WAVES; ++i) sum += sh.floats[i];
  consumer_sync();  // before the next one writes
  return sum;
}

}  // namespace mk
