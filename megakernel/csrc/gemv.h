// The matrix products: y = W x for the rows of a task, W from the ring. First the consumers put x into shared memory
// (normed or merged on the way if the task says so), then every team multiplies its pieces. What an op does with the rows
// is in its own file: it adds each row's sums in a fixed order (row_sum).
#pragma once

#include "merge.h"
#include "norm.h"
#include "wait.h"

namespace mk {

// Where the consumers are.
struct Consumer {
  uint32_t pieces;  // streamed so far
  int iteration;
};

MK_DEVICE int position_of(int iteration) { return shared().params.position + iteration; }

// Heads whose inputs the rows of a task multiply: [first, end); one if all rows have the same input.
MK_DEVICE void heads_of(const Task& task, const Args& args, int* first, int* end) {
  *first = args.head_rows ? task.rows[0] / args.head_rows : 0;
  *end = args.head_rows ? (task.rows[1] - 1) / args.head_rows + 1 : 1;
}

MK_DEVICE void stage_input(const Task& task, const Args& args) {
  const Params& p = shared().params;
  int at = (By)task.by == By::all ? 0 : task.at;
  const unsigned char* from = (const unsigned char*)p.work + args.input + at * args.input_bytes;
  bf16* x = shared().x;
  int first, end;
  heads_of(task, args, &first, &end);
  switch ((Input)args.input_kind) {
    case Input::norm:
      norm((const bf16*)from, (const bf16*)(p.weights + args.norm), args.cols, args.kv_eps ? p.kv_eps : p.eps, x);
      break;
    case Input::merge: {
      if (!args.head_rows) end = args.cols / args.head_stride;
      float* sums = (float*)(x + (end - first) * args.head_stride);
      merge((const float*)from, args.chunks, first, end, args.head_stride, x, sums);
      break;
    }
    case Input::plain: {
      bool split = (Code)task.code == Code::gemv_splitk;
      int vectors = (split ? task.chunk[1] - task.chunk[0] : args.cols) / 8;
      const bf16* vector = (const bf16*)from + (split ? task.chunk[0] : 0);
      MK_UNROLL(1)
      for (int i = thread(); i < (end - first) * vectors; i += CONSUMERS)
        store_vector(x + 8 * i, fresh((const Vec16*)(vector + (first + i / vectors) * args.head_stride) + i % vectors));
      break;
    }
  }
}

// A sum over every `step`-th vector of a row. Two sums, so that fewer products wait for one another.
struct Dot {
  float low, high;

  MK_DEVICE Dot() : low(0), high(0) {}
  MK_DEVICE void add(const Vec16& weights, const Vec16& x) {
    for (int j = 0; j < 4; ++j) {
      low = fmaf(low_half(weights.word[j]), low_half(x.word[j]), low);
      high = fmaf(high_half(weights.word[j]), high_half(x.word[j]), high);
    }
  }
  MK_DEVICE float sum() const { return low + high; }
};

// Two rows at once.
MK_DEVICE void dots(const bf16* const weights[2], const bf16* const x[2], int begin, int end, int step, float sums[2]) {
  Dot first, second;
  if (x[0] == x[1]) {
    MK_UNROLL(2)
    for (int i = begin; i < end; i += step) {
      const Vec16 both = load_vector(x[0] + i);
      first.add(load_vector(weights[0] + i), both);
      second.add(load_vector(weights[1] + i), both);
    }
  } else {
    MK_UNROLL(1)
    for (int i = begin; i < end; i += step) {
      first.add(load_vector(weights[0] + i), load_vector(x[0] + i));
      second.add(load_vector(weights[1] + i), load_vector(x[1] + i));
    }
  }
  sums[0] = first.sum();
  sums[1] = second.sum();
}

// One wave's share of a piece: whole rows of it, or every TEAM_WAVES-th part of its rows if these are fewer. Rows that
// are too short for a wave are shared by a part of it, so that several are on their way at once.
MK_DEVICE void multiply(const Task& task, const Args& args, const Stream& s, const Piece& piece, const bf16* stage) {
  Shared& sh = shared();
  const bool together = s.at_once < TEAM_WAVES;
  int lanes = WAVE;  // of a row
  while (!together && (lanes / 2) * 8 >= s.cols) lanes /= 2;
  const int mine = wave() % TEAM_WAVES, group = lane() / lanes, groups = WAVE / lanes;
  const int part = piece.col / s.piece * (together ? TEAM_WAVES : 1) + (together ? mine : 0);
  const int begin = ((together ? mine * WAVE : 0) + lane() % lanes) * 8, step = (together ? TEAM_WAVES : 1) * lanes * 8;
  const int next = together ? 1 : TEAM_WAVES * groups;
  const int first_head = args.head_rows ? task.rows[0] / args.head_rows : 0;
  MK_UNROLL(1)
  for (int base = together ? 0 : mine * groups; base < piece.rows; base += 2 * next) {
    // two rows, so that their sums over the wave overlap
    const int rows[2] = {base + group, base + group + next};
    const bf16 *weights[2], *x[2];
    for (int i = 0; i < 2; ++i) {
      int row = rows[i] < piece.rows ? rows[i] : piece.rows - 1;  // if there is no second row this one counts for nothing
      int head = args.head_rows ? (task.rows[0] + piece.row + row) / args.head_rows - first_head : 0;
      weights[i] = stage + row * piece.cols;
      x[i] = sh.x + head * s.cols + piece.col;
    }
    float sums[2];
    dots(weights, x, begin, piece.cols, step, sums);
    wave_sync();
    for (int mask = lanes / 2; mask; mask /= 2)
      for (int i = 0; i < 2; ++i) sums[i] += shuffle_xor(sums[i], mask);
    for (int i = 0; i < 2; ++i)
      if (lane() % lanes == 0 && rows[i] < piece.rows) sh.slots[(piece.row + rows[i]) * s.parts + part] = sums[i];
  }
}

// Sums of the rows of a task in `slots`, of both matrices if it has two. All consumers call it.
MK_DEVICE void product(Consumer& c, const Task& task, const Args& args, const Stream& s) {
  Shared& sh = shared();
  stage_input(task, args);
  consumer_sync();
  int team = wave() / TEAM_WAVES;
  // the first piece of this team from here on
  int number = (int)((uint32_t)(team + TEAMS) - c.pieces % TEAMS) % TEAMS;
  MK_UNROLL(1)
  for (; number < s.count; number += TEAMS) {
    uint32_t piece = c.pieces + number, stage = piece % STAGES;
    // after a launch was given up nothing arrives, and nothing that is computed counts
    gate_wait(&sh.full[stage], piece / STAGES);
    multiply(task, args, s, piece_of(s, number), (const bf16*)sh.ring[stage]);
    wave_sync();
    if (lane() == 0) gate_arrive(&sh.empty[stage]);
  }
  c.pieces += s.count;
  consumer_sync();
}

MK_DEVICE float row_sum(const Stream& s, int row) {
  const Shared& sh = shared();
  float sum = 0;
  MK_UNROLL(1)
  for (int part = 0; part < s.parts; ++part) sum += sh.slots[row * s.parts + part];
  return sum;
}

MK_DEVICE bf16* output_of(const Task& task, const Args& args) {
  int at = (By)task.by == By::all ? 0 : task.at;
  return (bf16*)(shared().params.work + args.out + at * args.out_bytes);
}

}  // namespace mk
