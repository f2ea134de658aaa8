// out = residual + W x.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_res(const Task& task, const Args& args, const Stream& s, int iteration) {
  const uint32_t tag = tag_of(iteration);
  const Tagged* residual = (const Tagged*)(shared().params.work + args.residual);
  Tagged* out = output_of(task, args);
  MK_UNROLL(1)
  for (int i = thread(); i < s.rows; i += CONSUMERS) {
    int row = task.rows[0] + i;
    post(out + row, to_bf16(to_float(take(residual + row, tag)) + rounded(row_sum(s, i))), tag);
  }
}

}  // namespace mk
