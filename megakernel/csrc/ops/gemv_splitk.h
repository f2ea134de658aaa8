// A share of the columns of W x, left in fp32 for splitk_reduce.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_splitk(const Task& task, const Args& args, const Stream& s) {
  float* out = (float*)(shared().params.work + args.out + task.at * args.out_bytes);
  MK_UNROLL(1)
  for (int i = thread(); i < s.rows; i += CONSUMERS) out[task.rows[0] + i] = row_sum(s, i);
}

}  // namespace mk
