// Attention of some heads over a chunk of the positions in the cache (DeepSeek-V2, 2024, section 2.1). Decompressed:
// keys and values of each head are in the cache. Absorbed: queries were taken through the key half of kv_b_proj, and
// the latents stand for both keys and values of all heads.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE float pair_dot(const bf16* a, const bf16* b, int pairs) {
  float sum = 0;
  for (int i = lane(); i < pairs; i += WAVE) {
    uint32_t x = *(const uint32_t*)(a + 2 * i), y = *(const uint32_t*)(b + 2 * i);
    sum = fmaf(low_half(x), low_half(y), sum);
    sum = fmaf(high_half(x), high_half(y), sum);
  }
  return sum;
}

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
  float* scores = sh.scratch;         // [heads][positions of a whole chunk]
  const int pitch = task.chunk[1] - begin;

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

  // the row of a position that holds the keys, and the one that holds their rotated part
  const bf16* cache = (const bf16*)(p.cache + args.cache);
  for (int i = wave(); i < heads * positions; i += CONSUMER_WAVES) {
    int head = i / positions, position = begin + i % positions;
    const bf16* keys = cache + (int64_t)position * args.cache_pitch;
    const bf16* turned;
    if (absorbed) {
      if (folded && position == now) keys = row;
      turned = keys + p.lora;
    } else {
      keys += (first + head) * (p.nope + p.v);
      turned = (const bf16*)(p.cache + args.rope_cache) + (int64_t)position * p.rope;
    }
    const bf16* own = queries + head * each;
    float score = wave_sum(pair_dot(keys, own, plain / 2) + pair_dot(turned, own + plain, p.rope / 2));
    if (lane() == 0) scores[head * pitch + i % positions] = score * p.softmax_scale;
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
    for (int j = 0; j < positions; ++j) {
      const bf16* values = cache + (int64_t)(begin + j) * args.cache_pitch;
      if (!absorbed)
        values += (first + head) * (p.nope + p.v) + p.nope;
      else if (folded && begin + j == now)
        values = row;
      uint32_t pair = *(const uint32_t*)(values + at);
      low = fmaf(scores[head * pitch + j], low_half(pair), low);
      high = fmaf(scores[head * pitch + j], high_half(pair), high);
    }
    float* head_out = out + (int64_t)(first + head) * (width + PARTIAL_STATS) + at;
    head_out[0] = low;
    head_out[1] = high;
  }
}

}  // namespace mk
