// The matrix products: y = W x for the rows of a task, W from the ring. First the consumers put x into shared memory
// (normed or merged on the way if the task says so), then every team multiplies its pieces. What an op does with the rows
// is in its own file: it adds each row's sums in a fixed order (row_sum).
#pragma once

#include "dot.h"
#include "merge.h"
#include "norm.h"

namespace mk {

// Where the consumers are.
struct Consumer {
  uint32_t pieces;  // streamed so far
  int iteration, slot;  // of the task
};

MK_DEVICE int position_of(int iteration) { return shared().params.position + iteration; }

MK_DEVICE void stage_input(const Task& task, const Args& args, const Stream& s, uint32_t tag) {
  const Params& p = shared().params;
  int at = (By)task.by == By::all ? 0 : task.at;
  const unsigned char* from = (const unsigned char*)p.work + args.input + at * args.input_bytes;
  const Tagged* vector = (const Tagged*)from;
  bf16* x = shared().x;
  const int first = s.head;
  int end = s.head + s.heads;
  switch ((Input)args.input_kind) {
    case Input::norm:
      norm(vector, tag, (const bf16*)(p.weights + args.norm), args.cols, args.kv_eps ? p.kv_eps : p.eps, x);
      break;
    case Input::merge: {
      if (!args.head_rows) end = args.cols / args.head_stride;
      merge((const float*)from, args.chunks, first, end, args.head_stride, x);
      break;
    }
    case Input::plain: {
      bool split = (Code)task.code == Code::gemv_splitk;
      int vectors = (split ? task.chunk[1] - task.chunk[0] : args.cols) / 8;
      if (split) vector += task.chunk[0];
      MK_UNROLL(1)
      for (int head = first; head < end; ++head, x += 8 * vectors) {
        const Tagged* own = vector + head * args.head_stride;
        MK_UNROLL(1)
        for (int i = thread(); i < vectors; i += CONSUMERS) store_vector(x + 8 * i, take_vector(own + 8 * i, tag));
      }
      break;
    }
  }
}

// What the lanes of a wave do with the rows of a piece: whole rows, or every TEAM_WAVES-th part of them if there are fewer
// rows than waves of the team. Rows that are too short for a wave are shared by a part of it, several at once.
struct Share {
  int group, own;   // of this lane: which of the rows at once, and its first element of a row
  int first, next;  // row of the wave, and from one row to the next
  int begin, step;  // elements of a row
  int part;         // of a row's sums, if the piece is the first of the row

  MK_DEVICE explicit Share(const Stream& s) {
    const bool together = TEAM_WAVES > 1 && s.at_once < TEAM_WAVES;
    const int mine = wave() % TEAM_WAVES, groups = WAVE >> s.lane_bits;
    group = lane() >> s.lane_bits;
    own = (lane() & ((1 << s.lane_bits) - 1)) * 8;
    first = together ? 0 : mine * groups;
    next = together ? 1 : TEAM_WAVES * groups;
    begin = together ? mine * WAVE * 8 : 0;
    step = (together ? TEAM_WAVES : 1) * WAVE * 8;
    part = together ? mine : 0;
  }
};

// So many rows of a piece, from `base` on: at once, so that x is loaded once, and their sums over the wave overlap.
template <int ROWS, bool ONE_INPUT>
MK_DEVICE void multiply(const Share& share, const Stream& s, const Task& task, const Args& args, const Piece& piece, const bf16* stage, int base) {
  Shared& sh = shared();
  int rows[ROWS];
  const bf16 *weights[ROWS], *x[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = base + share.group + i * share.next;
    const int row = rows[i] < piece.rows ? rows[i] : piece.rows - 1;  // a row that isn't there counts for nothing
    const int head = ONE_INPUT ? 0 : (task.rows[0] + piece.row + row) / args.head_rows - s.head;
    weights[i] = stage + row * piece.cols;
    x[i] = sh.x + head * s.cols + piece.col;
  }
  Dot sums[ROWS];
  int at = share.begin + share.own, left = piece.cols - share.begin;
  MK_UNROLL(2)
  for (; left >= share.step; left -= share.step, at += share.step) {
    Vec16 input = arranged(load_vector(x[0] + at));
    for (int i = 0; i < ROWS; ++i) {
      if (i && !ONE_INPUT) input = arranged(load_vector(x[i] + at));
      sums[i].add(load_vector(weights[i] + at), input);
    }
  }
  if (left > 0) {  // not all lanes have some
    const bool some = at < piece.cols;
    Vec16 input = {};
    if (some) input = arranged(load_vector(x[0] + at));
    for (int i = 0; i < ROWS; ++i) {
      Vec16 values = {};
      if (some) values = load_vector(weights[i] + at);
      if (some && i && !ONE_INPUT) input = arranged(load_vector(x[i] + at));
      sums[i].add(values, input);
    }
  }
  wave_sync();
  const int part = piece.number * (s.at_once < TEAM_WAVES ? TEAM_WAVES : 1) + share.part;
  for (int i = 0; i < ROWS; ++i) {
    const float total = sums[i].over(1 << s.lane_bits);
    if (share.own == 0 && rows[i] < piece.rows) sh.slots[(piece.row + rows[i]) * s.parts + part] = total;
  }
}

// Sums of the rows of a task in `slots`, of both matrices if it has two. All consumers call it.
MK_DEVICE void product(Consumer& c, const Task& task, const Args& args, const Stream& s) {
  Shared& sh = shared();
  stage_input(task, args, s, tag_of(c.iteration));
  consumer_sync();
  if (thread() == 0) gate_arrive(&sh.started[c.slot]);
  const Share share(s);
  int team = wave() / TEAM_WAVES;
  // the first piece of this team from here on
  int number = (int)((uint32_t)(team + TEAMS) - c.pieces % TEAMS) % TEAMS;
  MK_UNROLL(1)
  for (; number < s.count; number += TEAMS) {
    const uint32_t count = c.pieces + number, stage = count % STAGES;
    const Piece piece = piece_of(s, number);
    // after a launch was given up nothing arrives, and nothing that is computed counts
    gate_wait(&sh.full[stage], count / STAGES);
    const bf16* weights = (const bf16*)sh.ring[stage];
    int base = share.first;
    if (s.heads > 1) {
      MK_UNROLL(1)
      for (; base < piece.rows; base += 2 * share.next) multiply<2, false>(share, s, task, args, piece, weights, base);
    } else {
      MK_UNROLL(1)
      for (; piece.rows - base > 2 * share.next; base += 4 * share.next)
        multiply<4, true>(share, s, task, args, piece, weights, base);
      if (base < piece.rows) multiply<2, true>(share, s, task, args, piece, weights, base);
    }
    wave_sync();
    if (EVERY_THREAD || lane() == 0)
      MK_UNROLL(1)
      for (int i = 0; i < (EVERY_THREAD ? TEAMS : 1); ++i) gate_arrive(&sh.empty[stage]);  // for the other teams, too
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

MK_DEVICE Tagged* output_of(const Task& task, const Args& args) {
  int at = (By)task.by == By::all ? 0 : task.at;
  return (Tagged*)(shared().params.work + args.out + at * args.out_bytes);
}

}  // namespace mk
