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
  int64_t* rows;         // [positions]: where the row of the cache is; as row_at has it
  int64_t* turned;       // [positions]: and its rotated key
  float* scores;         // [heads][pitch]
};

// Rows are all in shared memory, or anywhere: what is known to be in shared memory is read by shorter code.
template <bool NEAR>
MK_DEVICE const bf16* row_at(int64_t place) {
  return NEAR ? (const bf16*)((const unsigned char*)&shared() + (int)place) : (const bf16*)place;
}
MK_DEVICE int64_t place_of(const void* near, bool all_near) {
  return all_near ? (int64_t)((const unsigned char*)near - (const unsigned char*)&shared()) : (int64_t)near;
}

// As `Dot` wants them. What is read was written by other blocks, and is far away: one load each, whatever it is.
MK_DEVICE void stage_queries(const Attention& a, uint32_t tag) {
  const Params& p = shared().params;
  const Tagged* query = (const Tagged*)(p.work + a.args->query);
  const int vectors = a.each / 8;
  MK_UNROLL(1)
  for (int i = thread(); i < a.heads * vectors; i += CONSUMERS) {
    const int own = i / vectors, head = a.first + own, at = (i - own * vectors) * 8;
    const Tagged* from = query + head * (p.nope + p.rope) + at;
    if (a.absorbed) from = at < a.plain ? (const Tagged*)(p.work + a.args->absorbed) + head * p.lora + at : from - p.lora + p.nope;
    if (at >= a.plain && !a.folded) from = (const Tagged*)(p.work + a.args->rotated) + head * p.rope + at - a.plain;
    Vec16 values = take_vector(from, tag);
    if (at >= a.plain && a.folded) values = rotated_vector(values, at - a.plain, a.now);
    store_vector(a.queries + 8 * i, arranged(values));
  }
}

// The products of `count` elements of a key with two queries. The key may have another part for the other query.
MK_DEVICE void add_products(Dot sums[2], const bf16* key, int other_key, const bf16* query, int other_query, int own, int count) {
  MK_UNROLL(3)
  for (; count >= 64; count -= 64, own += 64) {
    const Vec16 values = load_vector(key + own);
    sums[0].add(values, load_vector(query + own));
    sums[1].add(other_key ? load_vector(key + own + other_key) : values, load_vector(query + own + other_query));
  }
  if (count > 0) {  // not all lanes have some
    Vec16 values = {}, others = {}, queries[2] = {};
    if (lane() % 8 * 8 < count) {
      values = load_vector(key + own);
      others = load_vector(key + own + other_key);
      queries[0] = load_vector(query + own);
      queries[1] = load_vector(query + own + other_query);
    }
    sums[0].add(values, queries[0]);
    sums[1].add(others, queries[1]);
  }
}

// Eight lanes take a position, for two heads at once, which may share its key.
template <bool NEAR>
MK_DEVICE void score(const Attention& a) {
  constexpr int AT_ONCE = WAVE / 8;
  const float scale = shared().params.softmax_scale;
  const int own = lane() % 8 * 8;
  MK_UNROLL(1)
  for (int first = 0; first < a.heads; first += 2) {
    const bool both = first + 1 < a.heads;
    const bf16* query = a.queries + first * a.each;
    const int other_query = both ? a.each : 0;
    MK_UNROLL(1)
    for (int base = wave() * AT_ONCE; base < a.positions; base += CONSUMER_WAVES * AT_ONCE) {
      int position = base + lane() / 8;
      const bool there = position < a.positions;
      if (!there) position = a.positions - 1;
      const bf16* row = row_at<NEAR>(a.rows[position]) + first * a.head_pitch;
      Dot sums[2];
      if (a.absorbed) {
        add_products(sums, row, 0, query, other_query, own, a.each);
      } else {
        add_products(sums, row, both ? a.head_pitch : 0, query, other_query, own, a.plain);
        add_products(sums, row_at<NEAR>(a.turned[position]), 0, query + a.plain, other_query, own, a.each - a.plain);
      }
      wave_sync();
      const float one = sums[0].over(8) * scale, two = sums[1].over(8) * scale;
      if (own == 0 && there) {
        a.scores[first * a.pitch + position] = one;
        if (both) a.scores[(first + 1) * a.pitch + position] = two;
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

// The weighted sums of the values. Eight lanes have eight elements each, of two heads if these share the values; the
// others of a wave have the same elements, and other positions.
template <bool NEAR>
MK_DEVICE void mix(const Attention& a, float* out) {
  constexpr int LANES = 8, SHARES = WAVE / LANES;
  const int vectors = a.width / 8, at_once = a.head_pitch ? 1 : 2, pairs = (a.heads + at_once - 1) / at_once;
  MK_UNROLL(1)
  for (int pair = 0; pair < pairs; ++pair) {
    const int head = pair * at_once;
    const bool both = !a.head_pitch && head + 1 < a.heads;
    const float *weights = a.scores + head * a.pitch, *others = both ? weights + a.pitch : weights;
    MK_UNROLL(1)
    for (int base = wave() * LANES; base < vectors; base += CONSUMER_WAVES * LANES) {
      const int vector = base + lane() % LANES;
      const int from = head * a.head_pitch + a.value + 8 * (vector < vectors ? vector : 0);
      float sums[2][8] = {};
      MK_UNROLL(4)
      for (int j = lane() / LANES; j < a.positions; j += SHARES) {
        const Vec16 values = load_vector(row_at<NEAR>(a.rows[j]) + from);
        const float weight = weights[j], other = others[j];
        for (int k = 0; k < 4; ++k) {
          const float low = low_half(values.word[k]), high = high_half(values.word[k]);
          sums[0][2 * k] = fmaf(weight, low, sums[0][2 * k]);
          sums[0][2 * k + 1] = fmaf(weight, high, sums[0][2 * k + 1]);
          sums[1][2 * k] = fmaf(other, low, sums[1][2 * k]);
          sums[1][2 * k + 1] = fmaf(other, high, sums[1][2 * k + 1]);
        }
      }
      for (int mask = LANES; mask < WAVE; mask *= 2)
        for (int h = 0; h < 2; ++h)
          for (int k = 0; k < 8; ++k) sums[h][k] += shuffle_xor(sums[h][k], mask);
      if (lane() >= 2 * LANES || vector >= vectors) continue;
      const bool second = lane() >= LANES;  // stores the other head's
      if (second && !both) continue;
      float* to = out + (int64_t)(a.first + head + second) * (a.width + PARTIAL_STATS) + 8 * vector;
      for (int k = 0; k < 8; k += 4) {
        Vec16 quad;
        for (int l = 0; l < 4; ++l) quad.word[l] = float_to_bits(second ? sums[1][k + l] : sums[0][k + l]);
        store_vector(to + k, quad);
      }
    }
  }
}

// Where the rows of a stream lie in the ring, if its first piece was number `base`. Nothing if it has no pieces.
MK_DEVICE void place_rows(const Stream& s, uint32_t base, bool all_near, int64_t* rows) {
  MK_UNROLL(1)
  for (int row = thread(); s.count && row < s.rows; row += CONSUMERS) {
    const int piece = row / s.at_once;
    rows[row] = place_of(shared().ring[(base + (uint32_t)piece) % STAGES] + (row - piece * s.at_once) * s.cols * 2, all_near);
  }
}

template <bool NEAR>
MK_DEVICE void attend(const Attention& a, float* out) {
  score<NEAR>(a);
  consumer_sync();
  weigh(a, out);
  consumer_sync();
  mix<NEAR>(a, out);
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
  a.first = sh.streams[slot][0].head;
  a.heads = sh.streams[slot][0].heads;
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
  a.rows = (int64_t*)sh.scratch;
  a.turned = a.rows + a.pitch;
  a.scores = (float*)(a.turned + a.pitch);

  const uint32_t tag = tag_of(iteration);
  stage_queries(a, tag);
  const bool holds_now = begin <= a.now && a.now < end;
  if (a.absorbed && a.folded && holds_now) {
    const Tagged* kva = (const Tagged*)(p.work + args.kva);
    norm(kva, tag, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, row);
    MK_UNROLL(1)
    for (int i = thread(); i < p.rope; i += CONSUMERS) row[p.lora + i] = rotated(kva + p.lora, tag, i, a.now);
    consumer_sync();
    if (task.flags & APPENDS) {
      bf16* out = (bf16*)(p.cache + args.cache) + (int64_t)a.now * args.cache_pitch;
      MK_UNROLL(1)
      for (int i = thread(); i < a.each; i += CONSUMERS) out[i] = row[i];
    }
  }

  // Rows before this position are in the ring, if they fit, and this position's is in shared memory if it is not in the
  // cache yet.
  const Stream rows = sh.streams[slot][0], turned = sh.streams[slot][1];
  const int pieces = rows.count + turned.count, held = rows.count ? rows.rows : 0;
  const bool own_row = a.absorbed && a.folded && holds_now, all_near = held + own_row == a.positions;
  place_rows(rows, streamed, all_near, a.rows);
  if (!a.absorbed) place_rows(turned, streamed + rows.count, all_near, a.turned);
  MK_UNROLL(1)
  for (int i = held + thread(); i < a.positions; i += CONSUMERS) {
    int64_t position = begin + i;
    const bf16* cached = (const bf16*)(p.cache + args.cache) + position * args.cache_pitch + a.first * a.head_pitch;
    a.rows[i] = own_row && position == a.now ? place_of(row, all_near) : (int64_t)cached;
    if (!a.absorbed) a.turned[i] = (int64_t)((const bf16*)(p.cache + args.rope_cache) + position * p.rope);
  }
  MK_UNROLL(1)
  for (int i = EVERY_THREAD ? 0 : lane(); i < pieces; i += EVERY_THREAD ? 1 : WAVE)
    gate_wait(&sh.full[(streamed + i) % STAGES], (streamed + i) / STAGES);
  consumer_sync();

  float* out = (float*)(p.work + args.out + task.at * args.out_bytes);
  if (all_near)
    attend<true>(a, out);
  else
    attend<false>(a, out);

  consumer_sync();  // everybody has read the stages
  MK_UNROLL(1)
  for (int i = 0; i < pieces; ++i) {
    uint32_t piece = streamed + i;
    if (EVERY_THREAD || (piece % TEAMS == (uint32_t)(wave() / TEAM_WAVES) && lane() == 0)) gate_arrive(&sh.empty[piece % STAGES]);
  }
  return (uint32_t)pieces;
}

}  // namespace mk
