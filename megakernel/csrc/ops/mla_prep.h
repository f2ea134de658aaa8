// What else attention needs of a position, where its readers don't compute it themselves: rotated queries, the normed
// latent, and the rotated key.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void mla_prep(Consumer& c, const Task&, const Args& args) {
  const Params& p = c.p;
  const bf16* query = (const bf16*)(p.work + args.query);
  const bf16* kva = (const bf16*)(p.work + args.kva);
  bf16* queries = (bf16*)(p.work + args.rotated);
  for (int i = thread(); i < p.heads * p.rope; i += CONSUMERS) {
    int head = i / p.rope;
    queries[i] = rotated(p, query + head * (p.nope + p.rope) + p.nope, i % p.rope, c.position());
  }
  bool absorbed = args.absorbed >= 0;
  bf16* latent = absorbed ? (bf16*)(p.cache + args.cache) + (int64_t)c.position() * args.cache_pitch : (bf16*)(p.work + args.latent);
  bf16* key = absorbed ? latent + p.lora : (bf16*)(p.cache + args.rope_cache) + (int64_t)c.position() * p.rope;
  norm(c.sh, kva, (const bf16*)(p.weights + args.norm), p.lora, p.kv_eps, latent);
  for (int i = thread(); i < p.rope; i += CONSUMERS) key[i] = rotated(p, kva + p.lora, i, c.position());
}

}  // namespace mk
