// Waiting with a budget. A wait that takes too long gives the launch up for all workers; each of them then leaves, and
// writes down what it was doing.
#pragma once

#include "stream.h"

namespace mk {

struct Spin {
  int64_t left;

  MK_DEVICE Spin() : left(shared().params.spin_budget) {}

  // After an unsuccessful poll: whether to go on. All workers read the flag, so each looks at it only now and then.
  MK_DEVICE bool again() {
    uint32_t* abort = (uint32_t*)shared().params.abort;
    if (left-- <= 0) store_relaxed(abort, 1);
    if (left < 0 || ((left & 255) == 0 && load_relaxed(abort))) {
      shared().dead = 1;
      return false;
    }
    pause();
    return true;
  }
};

MK_CALL bool gate_wait_long(Gate* gate, uint32_t phase) {
  Spin spin;
  while (!gate_try_wait(gate, (int)(phase & 1u)))
    if (!spin.again()) return false;
  return true;
}

// False if the launch was given up.
MK_DEVICE bool gate_wait(Gate* gate, uint32_t phase) {
  return gate_try_wait(gate, (int)(phase & 1u)) || gate_wait_long(gate, phase);
}

MK_DEVICE uint32_t threshold_of(const Params& p, int event, int iteration) {
  return (uint32_t)((const int32_t*)p.thresholds)[event] * (uint32_t)(iteration + 1);
}

MK_DEVICE Dump* dump_of(const Params& p) { return (Dump*)p.dump + block(); }

// All of a wave wait, and all get the same answer.
MK_DEVICE bool wave_gate_wait(Gate* gate, uint32_t phase) {
  int alive = 1;
  if (EVERY_THREAD || lane() == 0) alive = gate_wait(gate, phase);
  alive = shuffle_first(alive);
  wave_sync();  // what lane 0 has acquired is there for all lanes
  return alive;
}

MK_DEVICE void note(Dump* dump, int event, uint32_t value, uint32_t threshold) {
  dump->event = event;
  dump->value = value;
  dump->threshold = threshold;
}

// By one thread: returns when the event was counted up as often as that, with everything written before it visible to this
// thread. False if the launch was given up; `dump` takes what was waited for, unless it is null.
MK_CALL bool event_wait(int event, uint32_t threshold, Dump* dump) {
  const uint32_t* counter = (const uint32_t*)shared().params.counters + event;
  Spin spin;
  while ((int32_t)(load_acquire(counter) - threshold) < 0)  // a relaxed poll would need an acquire after it, as far away
    if (!spin.again()) {
      if (dump) note(dump, event, load_relaxed(counter), threshold);
      return false;
    }
  return true;
}

// By one thread likewise, of a wave that gets the same answer.
MK_DEVICE bool wave_event_wait(int event, int iteration) {
  int alive = 1;
  if (lane() == 0) alive = event_wait(event, threshold_of(shared().params, event, iteration), nullptr);
  alive = shuffle_first(alive);
  wave_sync();  // what lane 0 has acquired is there for all lanes
  return alive;
}

}  // namespace mk
