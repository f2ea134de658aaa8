// The row of the token that this iteration reads: one that the host forces, or the one sampled before.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void embedding(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  int token = ((const int32_t*)p.forced)[iteration];
  if (token < 0) token = fresh((const int32_t*)(p.work + args.input));
  const bf16* row = (const bf16*)(p.weights + args.weight) + (int64_t)token * args.cols;
  Tagged* out = (Tagged*)(p.work + args.out);
  MK_UNROLL(1)
  for (int i = thread(); i < args.cols; i += CONSUMERS) post(out + i, row[i], tag_of(iteration));
}

}  // namespace mk
