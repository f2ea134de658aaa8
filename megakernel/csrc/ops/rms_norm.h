// The norm of a state, where its readers don't compute it themselves.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void rms_norm(Consumer& c, const Task&, const Args& args) {
  const bf16* x = (const bf16*)(c.p.work + args.input);
  norm(c.sh, x, (const bf16*)(c.p.weights + args.norm), args.cols, c.p.eps, (bf16*)(c.p.work + args.out));
}

}  // namespace mk
