// Attention of some heads over a chunk of the positions in the cache (DeepSeek-V2, 2024, section 2.1). Decompressed:
// keys and values of each head are in the cache. Absorbed: queries were taken through the key half of kv_b_proj, and
// the latents stand for both keys and values of all heads.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void attn_chunk(Consumer& c, const Task& task, const Args& args) {
  const Params& p = c.p;
  Shared& sh = c.sh;
  const bool absorbed = args.absorbed >= 0, folded = args.rotated < 0;
  const int width = args.head_stride, first = task.rows[0] / width, heads = task.rows[1] / width - first;
  const int now = c.position(), begin = task.chunk[0], end = task.chunk[1] < now + 1 ? task.chunk[1] : now + 1;
  const int positions = end > begin ? end - begin : 0;
  const int plain = absorbed ? p.lora : p.nope, each = plain + p.rope;
  bf16* queries = sh.x;               // [heads][plain + rope]
  bf16* row = queries + heads * each;  // this position's row of the latent cache, not in there yet
  const int pitch = task.chunk[1] - begin;
  const bf16** rows = (const bf16**)sh.scratch;  // [positions]: where the row of the cache is
  const bf16** turned = rows + pitch;            // [positions]: and its rotated key
  float* scores = (float*)(turned + pitch);      // [heads][positions of a whole chunk]

  const bf16* query = (const bf16*)(p.work + args.query);
  for (int i = thread(); i < heads * each; i += CONSUMERS) {
    int head = first + i / each, at = i % each;
    const bf16* own = query + head * (p.nope + p.rope);
    if (at < plain)
      queries[i] = fresh(absorbed ? (const bf16*)(p.work + args.absorbed) + head * p.lora + at : own + at);
    else if (folded)
      queries[i] = rotated(p, own + p.nope, at - plain, now);
    else
      queries[i] = fresh((const bf16*)(p.work + args.rotated) + head * p.rope + at - plain);
  }
  const bool holds_now = begin <= now && now < end;
  if (absorbed && folded && holds_now) {
    const bf16* kva = (const bf16*)(p.work + args.kva);
    norm(sh, kva, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, row);
    for (int i = thread(); i < p.rope; i += CONSUMERS) row[p.lora + i] = rotated(p, kva + p.lora, i, now);
    consumer_sync();
    if (task.flags & APPENDS) {
      bf16* out = (bf16*)(p.cache + args.cache) + (int64_t)now * args.cache_pitch;
      for (int i = thread(); i < each; i += CONSUMERS) out[i] = row[i];
    }
  }
  consumer_sync();

  // Rows from before the launch are in the ring and may have been for long, this position's is in shared memory if it is
  // not in the cache yet, and those between are read from the cache.
  const CacheStreams streams = cache_streams(p, task, args);
  const int each_head = p.nope + p.v, pieces = streams.held();
  for (int i = 0; i < pieces; ++i) gate_wait(p, sh, &sh.full[(c.pieces + i) % STAGES], (c.pieces + i) / STAGES);
  for (int i = thread(); i < positions; i += CONSUMERS) {
    int64_t position = begin + i;
    bool streamed = streams.fit() && i < streams.rows.rows;
    rows[i] = streamed ? in_ring(sh, streams.rows, c.pieces, i)
              : absorbed && folded && position == now
                  ? row
                  : (const bf16*)(p.cache + args.cache) + position * args.cache_pitch + (absorbed ? 0 : first * each_head);
    turned[i] = absorbed   ? rows[i] + p.lora
                : streamed ? in_ring(sh, streams.turned, c.pieces + streams.rows.count, i)
                           : (const bf16*)(p.cache + args.rope_cache) + position * p.rope;
  }
  consumer_sync();

  for (int i = wave(); i < heads * positions; i += CONSUMER_WAVES) {
    int head = i / positions, position = i % positions;
    const bf16* own = queries + head * each;
    float score = dot(rows[position] + (absorbed ? 0 : head * each_head), own, lane() * 8, plain, WAVE * 8);
    score = wave_sum(score + dot(turned[position], own + plain, lane() * 8, p.rope, WAVE * 8));
    if (lane() == 0) scores[head * pitch + position] = score * p.softmax_scale;
  }
  consumer_sync();

  float* out = (float*)(p.work + args.out + task.at * args.out_bytes);
  for (int head = wave(); head < heads; head += CONSUMER_WAVES) {
    float largest = -INFINITY, sum = 0;
    for (int i = lane(); i < positions; i += WAVE) largest = fmaxf(largest, scores[head * pitch + i]);
    largest = wave_max(largest);
    for (int i = lane(); i < positions; i += WAVE) {
      float weight = expf(scores[head * pitch + i] - largest);
      scores[head * pitch + i] = weight;
      sum += weight;
    }
    sum = wave_sum(sum);
    float* stats = out + (int64_t)(first + head) * (width + PARTIAL_STATS) + width;
    if (lane() == 0) {
      stats[0] = largest;
      stats[1] = sum;
    }
  }
  consumer_sync();

  for (int i = thread(); i < heads * (width / 2); i += CONSUMERS) {
    int head = i / (width / 2), at = i % (width / 2) * 2;
    float low = 0, high = 0;
    MK_UNROLL(4)
    for (int j = 0; j < positions; ++j) {
      uint32_t pair = *(const uint32_t*)(rows[j] + (absorbed ? at : head * each_head + p.nope + at));
      low = fmaf(scores[head * pitch + j], low_half(pair), low);
      high = fmaf(scores[head * pitch + j], high_half(pair), high);
    }
    float* head_out = out + (int64_t)(first + head) * (width + PARTIAL_STATS) + at;
    head_out[0] = low;
    head_out[1] = high;
  }

  consumer_sync();  // everybody has read the stages
  for (int i = 0; i < pieces; ++i) {
    uint32_t piece = c.pieces + i;
    if (piece % TEAMS == (uint32_t)(wave() / TEAM_WAVES) && lane() == 0) gate_arrive(&sh.empty[piece % STAGES]);
  }
  c.pieces += pieces;
}

}  // namespace mk
