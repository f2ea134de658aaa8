// out = residual + the shares that gemv_splitk left, added in their order.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void splitk_reduce(int slot, int iteration) {
  const Params& p = shared().params;
  const Args& args = shared().args[slot];
  const float* partials = (const float*)(p.work + args.input);
  const uint32_t tag = tag_of(iteration);
  const Tagged* residual = (const Tagged*)(p.work + args.residual);
  Tagged* out = (Tagged*)(p.work + args.out);
  MK_UNROLL(1)
  for (int i = thread(); i < args.cols; i += CONSUMERS) {
    float sum = 0;
    for (int part = 0; part < args.chunks; ++part) sum += fresh(&partials[(int64_t)part * args.cols + i]);
    post(out + i, to_bf16(to_float(take(residual + i, tag)) + rounded(sum)), tag);
  }
}

}  // namespace mk
