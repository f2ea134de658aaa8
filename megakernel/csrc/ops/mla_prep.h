// What else attention needs of a position, where its readers don't compute it themselves: rotated queries, the normed
// latent, and the rotated key.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void mla_prep(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  const int position = position_of(iteration);
  const bf16* query = (const bf16*)(p.work + args.query);
  const bf16* kva = (const bf16*)(p.work + args.kva);
  bf16* queries = (bf16*)(p.work + args.rotated);
  MK_UNROLL(1)
  for (int i = thread(); i < p.heads * p.rope; i += CONSUMERS) {
    int head = i / p.rope;
    queries[i] = rotated(query + head * (p.nope + p.rope) + p.nope, i % p.rope, position);
  }
  bool absorbed = args.absorbed >= 0;
  bf16* latent = absorbed ? (bf16*)(p.cache + args.cache) + (int64_t)position * args.cache_pitch : (bf16*)(p.work + args.latent);
  bf16* key = absorbed ? latent + p.lora : (bf16*)(p.cache + args.rope_cache) + (int64_t)position * p.rope;
  norm(kva, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, latent);
  MK_UNROLL(1)
  for (int i = thread(); i < p.rope; i += CONSUMERS) key[i] = rotated(kva + p.lora, i, position);
}

}  // namespace mk
