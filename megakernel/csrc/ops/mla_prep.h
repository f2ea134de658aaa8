// What else attention needs of a position, where its readers don't compute it themselves: rotated queries, the normed
// latent, and the rotated key.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void mla_prep(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  const int position = position_of(iteration);
  const uint32_t tag = tag_of(iteration);
  const Tagged* query = (const Tagged*)(p.work + args.query);
  const Tagged* kva = (const Tagged*)(p.work + args.kva);
  Tagged* queries = (Tagged*)(p.work + args.rotated);
  MK_UNROLL(1)
  for (int i = thread(); i < p.heads * p.rope; i += CONSUMERS) {
    int head = i / p.rope;
    post(queries + i, rotated(query + head * (p.nope + p.rope) + p.nope, tag, i % p.rope, position), tag);
  }
  const bool absorbed = args.absorbed >= 0;
  bf16* row = (bf16*)(p.cache + args.cache) + (int64_t)position * args.cache_pitch;
  bf16* key = absorbed ? row + p.lora : (bf16*)(p.cache + args.rope_cache) + (int64_t)position * p.rope;
  const bf16* latent = shared().x;
  norm(kva, tag, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, shared().x);
  MK_UNROLL(1)
  for (int i = thread(); i < p.rope; i += CONSUMERS) key[i] = rotated(kva + p.lora, tag, i, position);
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < p.lora; i += CONSUMERS) {
    if (absorbed)
      row[i] = latent[i];
    else
      post((Tagged*)(p.work + args.latent) + i, latent[i], tag);
  }
}

}  // namespace mk
