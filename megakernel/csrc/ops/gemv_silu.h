// out = silu(gate x) * up x (Shazeer, 2020), of the same rows of both matrices.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_silu(const Task& task, const Args& args, const Stream& s, int iteration) {
  Tagged* out = output_of(task, args);
  MK_UNROLL(1)
  for (int i = thread(); i < s.rows; i += CONSUMERS) {
    float gate = rounded(row_sum(s, i)), up = rounded(row_sum(s, s.rows + i));
    post(out + task.rows[0] + i, to_bf16(rounded(gate / (1.0f + expf(-gate))) * up), tag_of(iteration));
  }
}

}  // namespace mk
