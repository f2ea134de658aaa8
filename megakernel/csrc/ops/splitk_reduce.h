// out = residual + the shares that gemv_splitk left, added in their order.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void splitk_reduce(Consumer& c, const Task&, const Args& args) {
  const float* partials = (const float*)(c.p.work + args.input);
  const bf16* residual = (const bf16*)(c.p.work + args.residual);
  bf16* out = (bf16*)(c.p.work + args.out);
  for (int i = thread(); i < args.cols; i += CONSUMERS) {
    float sum = 0;
    for (int part = 0; part < args.chunks; ++part) sum += fresh(&partials[(int64_t)part * args.cols + i]);
    out[i] = to_bf16(to_float(fresh(&residual[i])) + rounded(sum));
  }
}

}  // namespace mk
