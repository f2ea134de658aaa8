// out = silu(gate x) * up x (Shazeer, 2020), of the same rows of both matrices.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void gemv_silu(Consumer& c, const Task& task, const Args& args, const Stream& s) {
  bf16* out = output_of(c.p, task, args);
  for (int i = thread(); i < s.rows; i += CONSUMERS) {
    float gate = rounded(row_sum(c.sh, s, i)), up = rounded(row_sum(c.sh, s, s.rows + i));
    out[task.rows[0] + i] = to_bf16(rounded(gate / (1.0f + expf(-gate))) * up);
  }
}

}  // namespace mk
