// Attention of some heads over a chunk of the positions in the cache (DeepSeek-V2, 2024, section 2.1). Decompressed:
// keys and values of each head are in the cache. Absorbed: queries were taken through the key half of kv_b_proj, and
// the latents stand for both keys and values of all heads.
#pragma once

#include "../gemv.h"

namespace mk {

// What the phases of a task share.
struct Attention {
  const Args* args;
  bool absorbed, folded;
  int width;             // of a head's output
  int first, heads;      // heads of the task
  int plain, each;       // of a key: elements that are not rotated, and all
  int value;             // where a head's values begin in a row
  int head_pitch;        // from head to head in a row; 0 if they share it
  int now, positions;
  int pitch;             // of scores: positions of a whole chunk
  bf16* queries;         // [heads][each]
  const bf16** rows;     // [positions]: where the row of the cache is
  const bf16** turned;   // [positions]: and its rotated key
  float* scores;         // [heads][pitch]
};

// Loads as many as there are at once: what is read was written by other blocks, and is far away.
MK_DEVICE void stage_queries(const Attention& a) {
  const Params& p = shared().params;
  const bf16* query = (const bf16*)(p.work + a.args->query);
  const int vectors = a.each / 8;
  MK_UNROLL(1)
  for (int i = thread(); i < a.heads * vectors; i += CONSUMERS) {
    int head = a.first + i / vectors, at = i % vectors * 8;
    const bf16* own = query + head * (p.nope + p.rope);
    Vec16 values;
    if (at < a.plain)
      values = fresh((const Vec16*)(a.absorbed ? (const bf16*)(p.work + a.args->absorbed) + head * p.lora + at : own + at));
    else if (a.folded)
      values = rotated_vector(own + p.nope, at - a.plain, a.now);
    else
      values = fresh((const Vec16*)((const bf16*)(p.work + a.args->rotated) + head * p.rope + at - a.plain));
    store_vector(a.queries + 8 * i, values);
  }
}

// A wave takes a position and two heads at once: they may share its key, and their sums over the wave overlap. Each lane
// keeps its part of the queries.
MK_DEVICE void score(const Attention& a) {
  constexpr int AT_ONCE = 2, VECTORS = (KEY_ELEMENTS + WAVE * 8 - 1) / (WAVE * 8);
  const Params& p = shared().params;
  MK_UNROLL(1)
  for (int first = 0; first < a.heads; first += AT_ONCE) {
    const bool both = first + 1 < a.heads;
    Vec16 queries[AT_ONCE][VECTORS];
    for (int j = 0; j < AT_ONCE; ++j)
      for (int k = 0; k < VECTORS; ++k) {
        const int at = (k * WAVE + lane()) * 8;
        queries[j][k] = Vec16{};
        if (at < a.each && (both || !j)) queries[j][k] = load_vector(a.queries + (first + j) * a.each + at);
      }
    MK_UNROLL(1)
    for (int position = wave(); position < a.positions; position += CONSUMER_WAVES) {
      const bf16 *row = a.rows[position] + first * a.head_pitch;
      const bf16* turned = a.absorbed ? row + a.plain : a.turned[position];
      Vec16 keys[VECTORS];
      for (int k = 0; k < VECTORS; ++k) {
        const int at = (k * WAVE + lane()) * 8;
        keys[k] = Vec16{};
        if (at < a.each) keys[k] = load_vector(at < a.plain ? row + at : turned + (at - a.plain));
      }
      Dot dots[AT_ONCE];
      for (int j = 0; j < AT_ONCE; ++j) {
        if (j && both && a.head_pitch)
          for (int k = 0; k < VECTORS; ++k) {
            const int at = (k * WAVE + lane()) * 8;
            if (at < a.plain) keys[k] = load_vector(row + a.head_pitch + at);
          }
        for (int k = 0; k < VECTORS; ++k) dots[j].add(keys[k], queries[j][k]);
      }
      float sums[AT_ONCE];
      for (int j = 0; j < AT_ONCE; ++j) sums[j] = dots[j].sum();
      for (int mask = WAVE / 2; mask; mask /= 2)
        for (int j = 0; j < AT_ONCE; ++j) sums[j] += shuffle_xor(sums[j], mask);
      if (lane() == 0) {
        a.scores[first * a.pitch + position] = sums[0] * p.softmax_scale;
        if (both) a.scores[(first + 1) * a.pitch + position] = sums[1] * p.softmax_scale;
      }
    }
  }
}

// Weights in place of scores; each head's largest score and sum into the chunk's result.
MK_DEVICE void weigh(const Attention& a, float* out) {
  MK_UNROLL(1)
  for (int head = wave(); head < a.heads; head += CONSUMER_WAVES) {
    float* own = a.scores + head * a.pitch;
    float largest = -INFINITY, sum = 0;
    MK_UNROLL(1)
    for (int i = lane(); i < a.positions; i += WAVE) largest = fmaxf(largest, own[i]);
    largest = wave_max(largest);
    MK_UNROLL(1)
    for (int i = lane(); i < a.positions; i += WAVE) {
      float weight = expf(own[i] - largest);
      own[i] = weight;
      sum += weight;
    }
    sum = wave_sum(sum);
    float* stats = out + (int64_t)(a.first + head) * (a.width + PARTIAL_STATS) + a.width;
    if (lane() == 0) {
      stats[0] = largest;
      stats[1] = sum;
    }
  }
}

// The weighted sums of the values. A thread has four elements of a head; if there are more threads than that, several
// share them, each with some of the positions.
MK_DEVICE void mix(const Attention& a, float* parts, float* out) {
  const int quads = a.width / 4, items = a.heads * quads;
  int shares = 1;
  while (shares * 2 * items <= CONSUMERS) shares *= 2;
  MK_UNROLL(1)
  for (int i = thread(); i < items * shares; i += CONSUMERS) {
    const int item = i % items, share = i / items, head = item / quads, at = item % quads * 4;
    const bf16* const* rows = a.rows;
    const float* weights = a.scores + head * a.pitch;
    const int from = head * a.head_pitch + a.value + at;
    float sums[4] = {0, 0, 0, 0};
    MK_UNROLL(4)
    for (int j = share; j < a.positions; j += shares) {
      const uint64_t quad = *(const uint64_t*)(rows[j] + from);
      const uint32_t first = (uint32_t)quad, second = (uint32_t)(quad >> 32);
      const float weight = weights[j];
      sums[0] = fmaf(weight, low_half(first), sums[0]);
      sums[1] = fmaf(weight, high_half(first), sums[1]);
      sums[2] = fmaf(weight, low_half(second), sums[2]);
      sums[3] = fmaf(weight, high_half(second), sums[3]);
    }
    float* to = shares > 1 ? parts + 4 * i : out + (int64_t)(a.first + head) * (a.width + PARTIAL_STATS) + at;
    store_vector(to, Vec16{{float_to_bits(sums[0]), float_to_bits(sums[1]), float_to_bits(sums[2]), float_to_bits(sums[3])}});
  }
  if (shares == 1) return;
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < items * 4; i += CONSUMERS) {
    float sum = 0;
    MK_UNROLL(1)
    for (int share = 0; share < shares; ++share) sum += parts[share * items * 4 + i];
    out[(int64_t)(a.first + i / a.width) * (a.width + PARTIAL_STATS) + i % a.width] = sum;
  }
}

// Where the first `held` rows of a stream lie in the ring, if its first piece was number `base`.
MK_DEVICE void place_rows(const Stream& s, uint32_t base, int held, const bf16** rows) {
  MK_UNROLL(1)
  for (int piece = wave(); piece * s.at_once < held; piece += CONSUMER_WAVES) {
    const bf16* stage = (const bf16*)shared().ring[(base + (uint32_t)piece) % STAGES];
    const int first = piece * s.at_once, count = held - first < s.at_once ? held - first : s.at_once;
    MK_UNROLL(1)
    for (int i = lane(); i < count; i += WAVE) rows[first + i] = stage + i * s.cols;
  }
}

// Returns how many pieces of the ring it has used: `streamed` were before.
MK_CALL uint32_t attn_chunk(int slot, int iteration, uint32_t streamed) {
  Shared& sh = shared();
  const Params& p = sh.params;
  const Task& task = sh.task[slot];
  const Args& args = sh.args[slot];
  Attention a{};
  a.args = &args;
  a.absorbed = args.absorbed >= 0;
  a.folded = args.rotated < 0;
  a.width = args.head_stride;
  a.first = task.rows[0] / a.width;
  a.heads = task.rows[1] / a.width - a.first;
  a.plain = a.absorbed ? p.lora : p.nope;
  a.each = a.plain + p.rope;
  a.value = a.absorbed ? 0 : p.nope;
  a.head_pitch = a.absorbed ? 0 : p.nope + p.v;
  a.now = position_of(iteration);
  const int begin = task.chunk[0], end = task.chunk[1] < a.now + 1 ? task.chunk[1] : a.now + 1;
  a.positions = end > begin ? end - begin : 0;
  a.pitch = task.chunk[1] - begin;
  a.queries = sh.x;
  bf16* row = a.queries + a.heads * a.each;  // this position's row of the latent cache, not in there yet
  float* parts = (float*)(row + a.each);
  a.rows = (const bf16**)sh.scratch;
  a.turned = a.rows + a.pitch;
  a.scores = (float*)(a.turned + a.pitch);

  stage_queries(a);
  const bool holds_now = begin <= a.now && a.now < end;
  if (a.absorbed && a.folded && holds_now) {
    const bf16* kva = (const bf16*)(p.work + args.kva);
    norm(kva, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, row);
    MK_UNROLL(1)
    for (int i = thread(); i < p.rope; i += CONSUMERS) row[p.lora + i] = rotated(kva + p.lora, i, a.now);
    consumer_sync();
    if (task.flags & APPENDS) {
      bf16* out = (bf16*)(p.cache + args.cache) + (int64_t)a.now * args.cache_pitch;
      MK_UNROLL(1)
      for (int i = thread(); i < a.each; i += CONSUMERS) out[i] = row[i];
    }
  }

  // Rows before this position are in the ring, a wave for each piece, and this position's is in shared memory if it is
  // not in the cache yet.
  const CacheStreams streams = cache_streams(p, task, args, iteration);
  const int pieces = streams.held(), held = streams.fit() ? streams.rows.rows : 0;
  place_rows(streams.rows, streamed, held, a.rows);
  if (!a.absorbed) place_rows(streams.turned, streamed + streams.rows.count, held, a.turned);
  MK_UNROLL(1)
  for (int i = held + thread(); i < a.positions; i += CONSUMERS) {
    int64_t position = begin + i;
    a.rows[i] = a.absorbed && a.folded && position == a.now
                    ? row
                    : (const bf16*)(p.cache + args.cache) + position * args.cache_pitch + a.first * a.head_pitch;
    if (!a.absorbed) a.turned[i] = (const bf16*)(p.cache + args.rope_cache) + position * p.rope;
  }
  MK_UNROLL(1)
  for (int i = 0; i < pieces; ++i) gate_wait(&sh.full[(streamed + i) % STAGES], (streamed + i) / STAGES);
  consumer_sync();

  float* out = (float*)(p.work + args.out + task.at * args.out_bytes);
  score(a);
  consumer_sync();
  weigh(a, out);
  consumer_sync();
  mix(a, parts, out);

  consumer_sync();  // everybody has read the stages
  MK_UNROLL(1)
  for (int i = 0; i < pieces; ++i) {
    uint32_t piece = streamed + i;
    if (piece % TEAMS == (uint32_t)(wave() / TEAM_WAVES) && lane() == 0) gate_arrive(&sh.empty[piece % STAGES]);
  }
  return (uint32_t)pieces;
}

}  // namespace mk
