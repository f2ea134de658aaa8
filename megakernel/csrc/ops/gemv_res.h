// out = residual + W x.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_res(const Task& task, const Args& args, const Stream& s) {
  const bf16* residual = (const bf16*)(shared().params.work + args.residual);
  bf16* out = output_of(task, args);
  MK_UNROLL(1)
  for (int i = thread(); i < s.rows; i += CONSUMERS) {
    int row = task.rows[0] + i;
    out[row] = to_bf16(to_float(fresh(&residual[row])) + rounded(row_sum(s, i)));
  }
}

}  // namespace mk
