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

// Of a task that reads pieces of the ring: which.
struct Stream {
  const unsigned char *matrix, *matrix2;
  int rows;       // of each matrix
  int matrices;   // 1, or 2 whose rows follow each other
  int pitch;      // elements from row to row
  int cols;       // elements of a row that are read
  int at_once;    // rows of a piece
  int pieces;     // of a row
  int piece;      // elements of a piece of a row
  int parts;      // sums that a row leaves: of each piece one, or one for each wave of the team
  int count;      // pieces in all
  int lane_bits;  // lanes of a wave for a row, as a power of two; several rows at once if these are short
  int head, heads;  // the first, and how many, of the inputs that the rows multiply; one if all rows have the same

  MK_DEVICE int total_rows() const { return rows * matrices; }
};

// On the host, words after an array that show whether something wrote past it.
#if defined(MK_HOST)
#define MK_GUARD(name) uint64_t name[64];
#else
#define MK_GUARD(name)
#endif

struct Shared {
  alignas(128) unsigned char ring[STAGES][STAGE_BYTES];
  Gate full[STAGES], empty[STAGES];        // of the ring of weights
  Gate announced[AHEAD], started[AHEAD], finished[AHEAD];  // of the tasks
  Task task[AHEAD];
  Args args[AHEAD];
  Stream streams[AHEAD][2];  // attention has two
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
  float floats[CONSUMERS / 32];  // at most one use in a task
  int32_t ints[CONSUMERS / 32];
  int32_t fired[8];  // events that this task was the last to count up
  int32_t fired_count;
  uint32_t dead;     // the launch was given up; what is computed from here on is not used
  uint32_t stop;     // `dead`, as the consumers agreed on it
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

}  // namespace mk
