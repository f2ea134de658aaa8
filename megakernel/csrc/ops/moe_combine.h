// out = residual + (the weighted sum of the chosen experts, in the order of their ids, + the shared experts).
#pragma once

#include "../gemv.h"

namespace mk {

// A wave without columns reads nothing: who reads something must be done before the token can be.
MK_CALL void moe_combine(int slot, int iteration) {
  Shared& sh = shared();
  const Params& p = shared().params;
  const Task& task = shared().task[slot];
  if (task.rows[0] + wave() * WAVE >= task.rows[1]) return;
  const Args& args = shared().args[slot];
  const uint32_t tag = tag_of(iteration);
  const Routing* routing = (const Routing*)(p.work + args.routing);
  // the chosen experts in the order of their ids: where each one's output lies, and its weight; for each wave apart
  int32_t* places = (int32_t*)sh.slots + wave() * 4 * p.topk;
  float* weights = (float*)places + p.topk;
  int32_t* experts = places + 2 * p.topk;
  float* chances = weights + 2 * p.topk;
  MK_UNROLL(1)
  for (int own = lane(); own < p.topk; own += WAVE) {
    const Choice choice = take(routing + own, tag);
    experts[own] = choice.expert;
    chances[own] = choice.weight;
  }
  wave_sync();
  MK_UNROLL(1)
  for (int own = lane(); own < p.topk; own += WAVE) {
    const int expert = experts[own];
    int rank = 0;
    MK_UNROLL(4)
    for (int other = 0; other < p.topk; ++other)  // equal only if the router saw NaN
      rank += experts[other] < expert || (experts[other] == expert && other < own);
    places[rank] = args.slots ? own : expert;
    weights[rank] = chances[own];
  }
  wave_sync();
  const Tagged* shared = (const Tagged*)(p.work + args.shared);
  const Tagged* residual = (const Tagged*)(p.work + args.residual);
  Tagged* out = (Tagged*)(p.work + args.out);
  MK_UNROLL(1)
  for (int i = task.rows[0] + thread(); i < task.rows[1]; i += CONSUMERS) {
    constexpr int AT_ONCE = 8;  // far away: these loads overlap
    const uint32_t last = load_relaxed(shared + i), before = load_relaxed(residual + i);
    float sum = 0;
    for (int base = 0; base < p.topk; base += AT_ONCE) {
      const Tagged* from[AT_ONCE];
      uint32_t parts[AT_ONCE];
      MK_UNROLL(8)
      for (int j = 0; j < AT_ONCE; ++j) {
        int rank = base + j < p.topk ? base + j : base;
        from[j] = (const Tagged*)(p.work + args.input + places[rank] * args.input_bytes) + i;
        parts[j] = load_relaxed(from[j]);
      }
      MK_UNROLL(8)
      for (int j = 0; j < AT_ONCE; ++j)
        if (base + j < p.topk) sum = rounded(sum + rounded(to_float(taken(from[j], parts[j], tag)) * weights[base + j]));
    }
    sum = rounded(sum + to_float(taken(shared + i, last, tag)));
    post(out + i, to_bf16(to_float(taken(residual + i, before, tag)) + sum), tag);
  }
}

}  // namespace mk
