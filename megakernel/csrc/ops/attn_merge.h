// The chunks of some heads' attention, merged where their readers don't do it.
#pragma once

#include "../gemv.h"

namespace mk {

MK_DEVICE void attn_merge(Consumer& c, const Task& task, const Args& args) {
  const float* partials = (const float*)(c.p.work + args.input);
  bf16* out = (bf16*)(c.p.work + args.out) + task.rows[0];
  int width = args.head_stride;
  merge(c.sh, partials, args.chunks, c.p.heads, task.rows[0] / width, task.rows[1] / width, width, out, (float*)c.sh.x);
}

}  // namespace mk
