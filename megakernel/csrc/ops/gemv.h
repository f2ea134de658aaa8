// out = W x: projections, the experts' second matrices, the router's logits, the LM head. Into `work`, or into this
// position's row of the decompressed cache.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv(const Task& task, const Args& args, const Stream& s, int iteration) {
  const Params& p = shared().params;
  const uint32_t tag = tag_of(iteration);
  MK_UNROLL(1)
  for (int i = thread(); i < s.rows; i += CONSUMERS) {
    int row = task.rows[0] + i;
    float value = row_sum(s, i);
    switch ((Out)args.out_kind) {
      case Out::bf16:
        post(output_of(task, args) + row, to_bf16(value), tag);
        break;
      case Out::fp32:
        post((TaggedFloat*)(p.work + args.out) + row, value, tag);
        break;
      case Out::logits:
        ((float*)(p.work + args.out))[row] = value;
        if (p.trace) ((float*)p.trace)[(int64_t)iteration * p.vocab + row] = value;
        break;
      case Out::kv_cache:
        ((bf16*)(p.cache + args.out))[(int64_t)position_of(iteration) * args.cache_pitch + row] = to_bf16(value);
        break;
    }
  }
  if (task.flags & APPENDS) {  // the rotated key that all heads share
    bf16* row = (bf16*)(p.cache + args.rope_cache) + (int64_t)position_of(iteration) * p.rope;
    const Tagged* key = (const Tagged*)(p.work + args.kva) + p.lora;
    MK_UNROLL(1)
    for (int i = thread(); i < p.rope; i += CONSUMERS) row[i] = rotated(key, tag, i, position_of(iteration));
  }
}

}  // namespace mk
