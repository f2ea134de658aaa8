// The chunks of some heads' attention, merged where their readers don't do it.
#pragma once

#include "../gemv.h"

namespace mk {

MK_CALL void attn_merge(int slot, int iteration) {
  const Params& p = shared().params;
  const Task& task = shared().task[slot];
  const Args& args = shared().args[slot];
  const float* partials = (const float*)(p.work + args.input);
  Tagged* out = (Tagged*)(p.work + args.out) + task.rows[0];
  int width = args.head_stride;
  merge(partials, args.chunks, task.rows[0] / width, task.rows[1] / width, width, shared().x);
  consumer_sync();
  MK_UNROLL(1)
  for (int i = thread(); i < task.rows[1] - task.rows[0]; i += CONSUMERS) post(out + i, shared().x[i], tag_of(iteration));
}

}  // namespace mk
