// A worker: one block that stays for the whole launch. Its producer wave takes tasks, announces them to the consumers
// and streams their weights as far ahead as the ring has room, across whatever the consumers still wait for; only the
// weights of a routed expert wait, for the router. The consumers wait for each task's events, run it, and count up.
//
// What a task writes is visible to the tasks that wait for it: its threads meet, one of them counts up with release
// order, the one that waits reads the counter with acquire order, and its threads meet again.
#pragma once

#include "ops/argmax_partial.h"
#include "ops/argmax_reduce.h"
#include "ops/attn_chunk.h"
#include "ops/attn_merge.h"
#include "ops/embedding.h"
#include "ops/gemv.h"
#include "ops/gemv_res.h"
#include "ops/gemv_silu.h"
#include "ops/gemv_splitk.h"
#include "ops/mla_prep.h"
#include "ops/moe_combine.h"
#include "ops/moe_gate_topk.h"
#include "ops/rms_norm.h"
#include "ops/splitk_reduce.h"

namespace mk {

// ------------------------------------------------------------------------------------------------------------ producer

struct Next {
  int32_t task;  // -1: there are no more
  int32_t iteration;
};

// Where a worker gets its tasks from: its own list, or the queue of ready tasks.
struct Source {
  const Params& p;
  Shared& sh;
  int32_t iteration, entry;

  MK_DEVICE Source(const Params& p, Shared& sh) : p(p), sh(sh), iteration(0), entry(0) {}

  // False if the launch was given up.
  MK_DEVICE bool take(Next* next) { return p.dynamic ? from_queue(next) : from_list(next); }

  MK_DEVICE bool from_list(Next* next) {
    const int32_t* first = (const int32_t*)p.list_first + block();
    int32_t count = first[1] - first[0];
    if (count == 0 || iteration == p.iterations) {
      *next = Next{-1, iteration};
      return true;
    }
    *next = Next{((const int32_t*)p.lists)[first[0] + entry], iteration};
    if (++entry == count) entry = 0, ++iteration;
    return true;
  }

  MK_DEVICE bool from_queue(Next* next) {
    int32_t task = -1, at = 0, alive = 1;
    if (lane() == 0) {
      uint32_t ticket = add_relaxed((uint32_t*)p.queue_ends, 1);
      at = (int32_t)(ticket / (uint32_t)p.num_tasks);
      if (at < p.iterations) {
        const uint64_t* slot = (const uint64_t*)p.queue + ticket % (uint32_t)p.num_tasks;
        Spin spin(p, sh);
        uint64_t word;
        while ((word = load_acquire(slot)) >> 32 != (uint64_t)at + 1)
          if (!spin.again()) {
            alive = 0;
            break;
          }
        task = (int32_t)(uint32_t)word;
      }
    }
    *next = Next{shuffle_first(task), shuffle_first(at)};
    return shuffle_first(alive);
  }
};

// Brings a stream into the ring. False if the launch was given up.
MK_DEVICE bool feed(const Params& p, Shared& sh, const Stream& s, uint32_t* pieces) {
  for (int i = 0; i < s.count; ++i, ++*pieces) {
    uint32_t stage = *pieces % STAGES;
    if (!wave_gate_wait(p, sh, &sh.empty[stage], *pieces / STAGES + 1)) return false;
    fetch(s, piece_of(s, i), sh.ring[stage], &sh.full[stage]);
  }
  return true;
}

MK_DEVICE void produce(const Params& p, Shared& sh) {
  Source source(p, sh);
  uint32_t pieces = 0;
  State state = State::done;
  int32_t task_number = -1;
  for (uint32_t n = 0;; ++n) {
    const uint32_t slot = n % AHEAD, round = n / AHEAD;
    state = State::waiting;
    if (!wave_gate_wait(p, sh, &sh.finished[slot], round + 1)) break;
    Next next;
    state = State::queue;
    if (!source.take(&next)) break;
    task_number = next.task;
    if (next.task >= 0) {
      const Task* task = (const Task*)p.tasks + next.task;
      const uint32_t* words = (const uint32_t*)task;
      for (int i = lane(); i < (int)(sizeof(Task) / 4); i += WAVE) ((uint32_t*)&sh.task[slot])[i] = words[i];
      words = (const uint32_t*)((const Args*)p.args + task->args);
      for (int i = lane(); i < (int)(sizeof(Args) / 4); i += WAVE) ((uint32_t*)&sh.args[slot])[i] = words[i];
    }
    if (lane() == 0) {
      sh.number[slot] = next.task;
      sh.iteration[slot] = next.iteration;
    }
    wave_sync();
    if (lane() == 0) gate_arrive(&sh.announced[slot]);
    if (next.task < 0) {
      state = State::done;
      break;
    }
    const Task& task = sh.task[slot];
    const Args& args = sh.args[slot];
    state = State::streaming;
    if ((Code)task.code == Code::attn_chunk) {
      CacheStreams cache = cache_streams(p, task, args, next.iteration);
      if (!cache.fit()) continue;
      // rows that this launch has written are complete when the iteration before this one has ended
      int ended = 1;
      if (next.iteration > 0) {
        state = State::waiting;
        if (lane() == 0) ended = event_wait(p, sh, p.launch_event, next.iteration, nullptr);
        ended = shuffle_first(ended);
        wave_sync();
        copies_after_stores();
        state = State::streaming;
      }
      if (!ended || !feed(p, sh, cache.rows, &pieces) || !feed(p, sh, cache.turned, &pieces)) break;
      continue;
    }
    if (!streams(task)) continue;
    int alive = 1;
    if (task.route_event >= 0) {
      state = State::routing;
      if (lane() == 0) alive = event_wait(p, sh, task.route_event, next.iteration, nullptr);
      alive = shuffle_first(alive);
      wave_sync();  // what lane 0 has acquired is there for all lanes
    }
    if (!alive) break;
    int expert = expert_of(p, task, args);
    if (expert < 0) continue;
    state = State::streaming;
    if (!feed(p, sh, stream_of(p, task, args, expert), &pieces)) break;
  }
  if (lane() == 0) {
    dump_of(p)->producer_state = (int32_t)state;
    dump_of(p)->producer_task = task_number;
  }
  // A block must not end while copies into its shared memory are on their way. They do arrive, so this needs no budget.
  uint32_t begun = pieces < STAGES ? 0 : pieces - STAGES;
  for (; begun < pieces; ++begun)
    while (!gate_try_wait(&sh.full[begun % STAGES], (int)(begun / STAGES & 1u))) pause();
}

// ----------------------------------------------------------------------------------------------------------- consumers

// The ops that multiply share one product, whose code is by far the largest; what they do with its rows is theirs.
MK_DEVICE void execute(Consumer& c, const Task& task, const Args& args) {
  if (streams(task)) {
    int expert = expert_of(c.p, task, args);
    if (expert < 0) return;
    Stream s = stream_of(c.p, task, args, expert);
    product(c, task, args, s);
    switch ((Code)task.code) {
      case Code::gemv: gemv(c, task, args, s); break;
      case Code::gemv_res: gemv_res(c, task, args, s); break;
      case Code::gemv_silu: gemv_silu(c, task, args, s); break;
      case Code::gemv_splitk: gemv_splitk(c, task, args, s); break;
      case Code::moe_gate_topk: moe_gate_topk(c, task, args, s); break;
      default: break;
    }
    return;
  }
  switch ((Code)task.code) {
    case Code::embedding: embedding(c, task, args); break;
    case Code::rms_norm: rms_norm(c, task, args); break;
    case Code::splitk_reduce: splitk_reduce(c, task, args); break;
    case Code::mla_prep: mla_prep(c, task, args); break;
    case Code::attn_chunk: attn_chunk(c, task, args); break;
    case Code::attn_merge: attn_merge(c, task, args); break;
    case Code::moe_combine: moe_combine(c, task, args); break;
    case Code::argmax_partial: argmax_partial(c, task, args); break;
    case Code::argmax_reduce: argmax_reduce(c, task, args); break;
    default: break;
  }
}

// By one thread: one more producer of an event is done. Notes the events that have fired by that.
MK_DEVICE void count_up(const Params& p, Shared& sh, int event, int iteration) {
  uint32_t now = add_acq_rel((uint32_t*)p.counters + event, 1) + 1;
  if (p.dynamic && now == threshold_of(p, event, iteration)) {
    sh.fired[sh.fired_count % 8] = event;
    ++sh.fired_count;
  }
}

// All consumers: puts the tasks that waited for nothing but this event into the queue.
MK_DEVICE void put_ready(const Params& p, int event, int iteration) {
  const int32_t* first = (const int32_t*)p.consumer_first + event;
  for (int i = first[0] + thread(); i < first[1]; i += CONSUMERS) {
    int32_t task = ((const int32_t*)p.consumers)[i];
    uint32_t needed = (uint32_t)((const Task*)p.tasks)[task].wait_count * (uint32_t)(iteration + 1);
    if (add_acq_rel((uint32_t*)p.arrived + task, 1) + 1 != needed) continue;
    uint32_t end = add_relaxed((uint32_t*)p.queue_ends + 1, 1);
    uint64_t epoch = end / (uint32_t)p.num_tasks + 1;
    store_release((uint64_t*)p.queue + end % (uint32_t)p.num_tasks, epoch << 32 | (uint32_t)task);
  }
}

// All consumers meet here and get the same answer, though `dead` may change at any time. Three places in a row use a
// flag each: one is written again only when everybody has left the place after the one that read it.
MK_DEVICE bool given_up(Shared& sh, int place) {
  if (thread() == 0) sh.stop[place] = sh.dead;
  consumer_sync();
  return sh.stop[place];
}

MK_DEVICE void consume(const Params& p, Shared& sh) {
  Consumer c = {p, sh, 0, 0};
  State state = State::idle;
  int32_t number = -1;
  for (uint32_t n = 0;; ++n) {
    const uint32_t slot = n % AHEAD;
    state = State::queue;
    gate_wait(p, sh, &sh.announced[slot], n / AHEAD);
    if (given_up(sh, 0)) break;
    number = sh.number[slot];
    if (number < 0) {
      state = State::done;
      break;
    }
    int64_t* line = p.timeline && thread() == 0 ? (int64_t*)p.timeline + 4 * (int64_t)number : nullptr;
    if (line) {
      line[0] = block();
      line[1] = nanoseconds();
    }
    const Task& task = sh.task[slot];
    c.iteration = sh.iteration[slot];
    state = State::waiting;
    if (thread() == 0) {
      const int32_t* waits = (const int32_t*)p.waits + task.wait_first;
      for (int i = 0; i < task.wait_count; ++i)
        if (!event_wait(p, sh, waits[i], c.iteration, dump_of(p))) break;
    }
    if (given_up(sh, 1)) break;
    if (line) line[2] = nanoseconds();
    state = State::streaming;
    execute(c, task, sh.args[slot]);
    if (given_up(sh, 2)) break;
    if (line) line[3] = nanoseconds();
    if (thread() == 0) {
      sh.fired_count = 0;
      const int32_t* triggers = (const int32_t*)p.triggers + task.trigger_first;
      for (int i = 0; i < task.trigger_count; ++i) count_up(p, sh, triggers[i], c.iteration);
      if ((Code)task.code == Code::terminate && c.iteration + 1 < p.iterations)
        count_up(p, sh, p.launch_event, c.iteration + 1);
    }
    if (p.dynamic) {
      consumer_sync();
      for (int i = 0; i < sh.fired_count; ++i) {
        bool begins = (Code)task.code == Code::terminate && sh.fired[i] == p.launch_event;
        put_ready(p, sh.fired[i], c.iteration + begins);
      }
      consumer_sync();
    }
    if (thread() == 0) gate_arrive(&sh.finished[slot]);
  }
  if (thread() == 0) {
    Dump* dump = dump_of(p);
    dump->state = (int32_t)state;
    dump->task = number;
    dump->iteration = c.iteration;
  }
}

MK_DEVICE void work(const Params& p, Shared& sh) {
  if (thread() == 0) {
    for (int i = 0; i < STAGES; ++i) {
      gate_init(&sh.full[i], 1);
      gate_init(&sh.empty[i], TEAM_WAVES);
    }
    for (int i = 0; i < AHEAD; ++i) {
      gate_init(&sh.announced[i], 1);
      gate_init(&sh.finished[i], 1);
    }
    gates_ready();
    consumer_sync_init();
    sh.dead = 0;
    *dump_of(p) = Dump{(int32_t)State::idle, 0, -1, -1, 0, 0, (int32_t)State::idle, -1};
  }
  block_sync();
  if (producing())
    produce(p, sh);
  else
    consume(p, sh);
}

}  // namespace mk
