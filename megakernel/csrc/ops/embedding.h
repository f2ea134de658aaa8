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
  for (int i = 8 * thread(); i < args.cols; i += 8 * CONSUMERS) {
    const Vec16 values = load_vector(row + i);
    for (int j = 0; j < 8; ++j) post(out + i + j, (bf16)(values.word[j / 2] >> 16 * (j % 2)), tag_of(iteration));
  }
}

}  // namespace mk
