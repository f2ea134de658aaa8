// Weights on their way through shared memory: which pieces of which matrices a task reads, in which order. The producer
// wave works it out, and leaves it for the consumers, who go through the same pieces.
//
// A piece is a few whole rows, or a part of one row where a row is larger than a stage. Piece c goes into stage
// c mod STAGES and belongs to team c mod TEAMS, c counting all pieces that the block has ever streamed.
#pragma once

#include "shared.h"

namespace mk {

struct Piece {
  int row, rows;  // counted through both matrices
  int number;     // among the pieces of a row
  int col, cols;
};

MK_DEVICE bool streams(const Task& task) {
  switch ((Code)task.code) {
    case Code::gemv: case Code::gemv_res: case Code::gemv_silu: case Code::gemv_splitk: case Code::moe_gate_topk:
      return true;
    default:
      return false;
  }
}

// Cuts rows of `cols` elements, of which `s` has the place and the number, into pieces. Few rows are cut into one for
// each of `teams` at least, but not so that a team has fewer rows than waves: how the sums of a row are added should not
// depend on how many rows there are.
MK_DEVICE Stream cut(Stream s, int teams) {
  constexpr int ITEMS = STAGE_BYTES / 2;
  s.piece = s.cols < ITEMS ? s.cols : ITEMS;
  s.pieces = (s.cols + s.piece - 1) / s.piece;
  const int share = (s.total_rows() + teams - 1) / teams;
  const int most = s.pieces > 1 ? 1 : ITEMS / s.cols, least = most < TEAM_WAVES ? most : TEAM_WAVES;
  s.at_once = share < least ? least : share > most ? most : share;
  s.parts = s.pieces * (s.at_once < TEAM_WAVES ? TEAM_WAVES : 1);
  s.count = (s.total_rows() + s.at_once - 1) / s.at_once * s.pieces;
  s.lane_bits = WAVE == 32 ? 5 : 6;
  while (s.at_once >= TEAM_WAVES && s.lane_bits > 2 && 4 << s.lane_bits >= s.cols) --s.lane_bits;
  return s;
}

// Of a task that multiplies, as if its expert were number 0.
MK_DEVICE Stream stream_of(const Params& p, const Task& task, const Args& args) {
  Stream s;
  bool split = (Code)task.code == Code::gemv_splitk;
  int first = (Code)task.code == Code::moe_gate_topk ? 0 : task.rows[0];
  s.rows = (Code)task.code == Code::moe_gate_topk ? p.experts : task.rows[1] - task.rows[0];
  s.matrices = (Code)task.code == Code::gemv_silu ? 2 : 1;
  s.pitch = args.cols;
  s.cols = split ? task.chunk[1] - task.chunk[0] : args.cols;
  int64_t offset = 2 * ((int64_t)first * s.pitch + (split ? task.chunk[0] : 0));
  s.matrix = (const unsigned char*)p.weights + args.weight + offset;
  s.matrix2 = (const unsigned char*)p.weights + args.weight2 + offset;
  s.head = args.head_rows ? task.rows[0] / args.head_rows : 0;
  s.heads = args.head_rows ? (task.rows[1] - 1) / args.head_rows + 1 - s.head : 1;
  return cut(s, TEAMS);
}

// What a task of attention reads of the cache: keys and values (or latents with rotated keys), and rotated keys that lie
// apart. Only positions before this one, which is written in the same iteration, and not before the task's events.
struct CacheStreams {
  Stream rows, turned;
};

// They stay in the ring, in whole rows, until the task is done. If they don't fit they are read where they are, and
// there are no pieces.
MK_DEVICE CacheStreams cache_streams(const Params& p, const Task& task, const Args& args, int iteration) {
  CacheStreams s;
  const int now = p.position + iteration, begin = task.chunk[0], end = task.chunk[1] < now ? task.chunk[1] : now;
  const bool absorbed = args.absorbed >= 0;
  const int width = args.head_stride, first = task.rows[0] / width, heads = task.rows[1] / width - first;
  const int each = p.nope + p.v;
  s.rows.rows = s.turned.rows = end > begin ? end - begin : 0;
  s.rows.matrices = s.turned.matrices = 1;
  s.rows.pitch = args.cache_pitch;
  s.rows.cols = absorbed ? p.lora + p.rope : heads * each;
  int64_t offset = (int64_t)begin * args.cache_pitch + (absorbed ? 0 : first * each);
  s.rows.matrix = (const unsigned char*)p.cache + args.cache + 2 * offset;
  s.rows.matrix2 = s.turned.matrix2 = nullptr;
  s.rows.head = s.turned.head = first;
  s.rows.heads = s.turned.heads = heads;
  s.turned.pitch = s.turned.cols = p.rope;
  s.turned.matrix = (const unsigned char*)p.cache + args.rope_cache + 2 * (int64_t)begin * p.rope;
  s.rows = cut(s.rows, 1);
  s.turned.matrices = s.turned.pieces = s.turned.at_once = 1;
  s.turned.count = 0;
  if (!absorbed) s.turned = cut(s.turned, 1);
  if (s.rows.pieces > 1 || s.turned.pieces > 1 || s.rows.count + s.turned.count > STAGES) s.rows.count = s.turned.count = 0;
  return s;
}

MK_DEVICE Piece piece_of(const Stream& s, int number) {
  Piece piece;
  const int line = s.pieces == 1 ? number : number / s.pieces;  // a division takes as long as much of the rest
  piece.row = line * s.at_once;
  piece.rows = s.total_rows() - piece.row < s.at_once ? s.total_rows() - piece.row : s.at_once;
  piece.number = number - line * s.pieces;
  piece.col = piece.number * s.piece;
  piece.cols = s.cols - piece.col < s.piece ? s.cols - piece.col : s.piece;
  return piece;
}

// By the producer: starts the copies of a piece. Rows that follow each other in memory are one copy.
MK_DEVICE void fetch(const Stream& s, const Piece& piece, unsigned char* stage, Gate* full) {
  int bytes = 2 * piece.cols;
  gate_expect(full, piece.rows * bytes);
  for (int row = 0; row < piece.rows;) {
    int at = piece.row + row;
    const unsigned char* matrix = at < s.rows ? s.matrix : s.matrix2;
    int within = at < s.rows ? at : at - s.rows;
    int run = 1;
    if (s.pitch == piece.cols) {
      run = s.rows - within;
      if (run > piece.rows - row) run = piece.rows - row;
    }
    copy_async(stage + row * bytes, matrix + 2 * ((int64_t)within * s.pitch + piece.col), run * bytes, full);
    row += run;
  }
  gate_copied(full);
}

}  // namespace mk
