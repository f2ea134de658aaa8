// The row of the token that this iteration reads: one that the host forces, or the one sampled before.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void embedding(Consumer& c, const Task&, const Args& args) {
  int token = ((const int32_t*)c.p.forced)[c.iteration];
  if (token < 0) token = fresh((const int32_t*)(c.p.work + args.input));
  const bf16* row = (const bf16*)(c.p.weights + args.weight) + (int64_t)token * args.cols;
  bf16* out = (bf16*)(c.p.work + args.out);
  for (int i = thread(); i < args.cols; i += CONSUMERS) out[i] = row[i];
}

}  // namespace mk
