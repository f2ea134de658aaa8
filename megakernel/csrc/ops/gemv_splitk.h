// A share of the columns of W x, left in fp32 for splitk_reduce.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_splitk(Consumer& c, const Task& task, const Args& args, const Stream& s) {
  float* out = (float*)(c.p.work + args.out + task.at * args.out_bytes);
  for (int i = thread(); i < s.rows; i += CONSUMERS) out[task.rows[0] + i] = row_sum(c.sh, s, i);
}

}  // namespace mk
