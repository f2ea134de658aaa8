// The matrix products: y = W x for the rows of a task, W from the ring. First the consumers put x into shared memory
// (normed or merged on the way if the task says so), then every team multiplies its pieces. What an op does with the rows
// is in its own file: it adds each row's sums in a fixed order (row_sum).
#pragma once

#include "merge.h"
#include "norm.h"
#include "wait.h"

namespace mk {

struct Consumer {
  const Params& p;
  Shared& sh;
  uint32_t pieces;  // streamed so far
  int iteration;

  MK_DEVICE int position() const { return p.position + iteration; }
};

// Heads whose inputs the rows of a task multiply: [first, end); one if all rows have the same input.
MK_DEVICE void heads_of(const Task& task, const Args& args, int* first, int* end) {
  *first = args.head_rows ? task.rows[0] / args.head_rows : 0;
  *end = args.head_rows ? (task.rows[1] - 1) / args.head_rows + 1 : 1;
}

MK_DEVICE void stage_input(Consumer& c, const Task& task, const Args& args) {
  int at = (By)task.by == By::all ? 0 : task.at;
  const unsigned char* from = (const unsigned char*)c.p.work + args.input + at * args.input_bytes;
  bf16* x = c.sh.x;
  switch ((Input)args.input_kind) {
    case Input::norm:
      norm(c.sh, (const bf16*)from, (const bf16*)(c.p.weights + args.norm), args.cols, args.kv_eps ? c.p.kv_eps : c.p.eps, x);
      break;
    case Input::merge: {
      int first, end;
      heads_of(task, args, &first, &end);
      if (!args.head_rows) end = args.cols / args.head_stride;
      float* sums = (float*)(x + (end - first) * args.head_stride);
      merge(c.sh, (const float*)from, args.chunks, c.p.heads, first, end, args.head_stride, x, sums);
      break;
    }
    case Input::plain: {
      int first, end;
      heads_of(task, args, &first, &end);
      bool split = (Code)task.code == Code::gemv_splitk;
      int cols = split ? task.chunk[1] - task.chunk[0] : args.cols;
      const bf16* vector = (const bf16*)from + (split ? task.chunk[0] : 0);
      for (int i = thread(); i < (end - first) * (cols / 8); i += CONSUMERS) {
        int head = first + i / (cols / 8), at = i % (cols / 8) * 8;
        *(Vec16*)&x[(head - first) * cols + at] = fresh((const Vec16*)&vector[head * args.head_stride + at]);
      }
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

MK_DEVICE float dot(const bf16* weights, const bf16* x, int begin, int end, int step) {
  Dot dot;
  MK_UNROLL(4)
  for (int i = begin; i < end; i += step) dot.add(*(const Vec16*)(weights + i), *(const Vec16*)(x + i));
  return dot.sum();
}

// Two rows at a time, the same sums as of each by itself.
MK_DEVICE void dot(const bf16* const weights[2], const bf16* const x[2], int begin, int end, int step, float sums[2]) {
  Dot first, second;
  if (x[0] == x[1]) {
    MK_UNROLL(4)
    for (int i = begin; i < end; i += step) {
      Vec16 both = *(const Vec16*)(x[0] + i);
      first.add(*(const Vec16*)(weights[0] + i), both);
      second.add(*(const Vec16*)(weights[1] + i), both);
    }
  } else {
    for (int i = begin; i < end; i += step) {
      first.add(*(const Vec16*)(weights[0] + i), *(const Vec16*)(x[0] + i));
      second.add(*(const Vec16*)(weights[1] + i), *(const Vec16*)(x[1] + i));
    }
  }
  sums[0] = first.sum();
  sums[1] = second.sum();
}

// One wave's share of a piece: whole rows of it, or every TEAM_WAVES-th part of its rows if these are fewer. Rows that
// are too short for a wave are shared by a part of it, so that several are on their way at once.
MK_DEVICE void multiply(Shared& sh, const Task& task, const Args& args, const Stream& s, const Piece& piece, const bf16* stage) {
  const bool together = s.at_once < TEAM_WAVES;
  int lanes = WAVE;  // of a row
  while (!together && (lanes / 2) * 8 >= s.cols) lanes /= 2;
  const int mine = wave() % TEAM_WAVES, group = lane() / lanes, groups = WAVE / lanes;
  const int part = piece.col / s.piece * (together ? TEAM_WAVES : 1) + (together ? mine : 0);
  const int begin = ((together ? mine * WAVE : 0) + lane() % lanes) * 8, step = (together ? TEAM_WAVES : 1) * lanes * 8;
  const int next = together ? 1 : TEAM_WAVES * groups;
  int first_head, end_head;
  heads_of(task, args, &first_head, &end_head);
  for (int base = together ? 0 : mine * groups; base < piece.rows; base += 2 * next) {
    const bool second = base + next < piece.rows;  // for some lanes at least; the others do their row again
    const bf16 *weights[2], *x[2];
    int row[2];
    float sums[2];
    for (int i = 0; i < 2; ++i) {
      row[i] = base + group + (second ? i * next : 0);
      int at = row[i] < piece.rows ? row[i] : piece.rows - 1;
      int head = args.head_rows ? (task.rows[0] + piece.row + at) / args.head_rows - first_head : 0;
      weights[i] = stage + at * piece.cols;
      x[i] = sh.x + head * s.cols + piece.col;
    }
    if (second)
      dot(weights, x, begin, piece.cols, step, sums);
    else
      sums[0] = dot(weights[0], x[0], begin, piece.cols, step), sums[1] = 0;
    for (int mask = lanes / 2; mask; mask /= 2)
      for (int i = 0; i < 2; ++i) sums[i] += shuffle_xor(sums[i], mask);
    for (int i = 0; i <= (int)second; ++i)
      if (lane() % lanes == 0 && row[i] < piece.rows) sh.slots[(piece.row + row[i]) * s.parts + part] = sums[i];
  }
}

// Sums of the rows of a task in `slots`, of both matrices if it has two. All consumers call it.
MK_DEVICE void product(Consumer& c, const Task& task, const Args& args, const Stream& s) {
  Shared& sh = c.sh;
  stage_input(c, task, args);
  consumer_sync();
  int team = wave() / TEAM_WAVES;
  // the first piece of this team from here on
  int number = (int)((uint32_t)(team + TEAMS) - c.pieces % TEAMS) % TEAMS;
  for (; number < s.count; number += TEAMS) {
    uint32_t piece = c.pieces + number, stage = piece % STAGES;
    // after a launch was given up nothing arrives, and nothing that is computed counts
    gate_wait(c.p, sh, &sh.full[stage], piece / STAGES);
    multiply(sh, task, args, s, piece_of(s, number), (const bf16*)sh.ring[stage]);
    wave_sync();
    if (lane() == 0) gate_arrive(&sh.empty[stage]);
  }
  c.pieces += s.count;
  consumer_sync();
}

MK_DEVICE float row_sum(const Shared& sh, const Stream& s, int row) {
  float sum = 0;
  for (int part = 0; part < s.parts; ++part) sum += sh.slots[row * s.parts + part];
  return sum;
}

MK_DEVICE bf16* output_of(const Params& p, const Task& task, const Args& args) {
  int at = (By)task.by == By::all ? 0 : task.at;
  return (bf16*)(p.work + args.out + at * args.out_bytes);
}

}  // namespace mk
