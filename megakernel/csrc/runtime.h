// A worker: one block that stays for the whole launch. Its producer wave takes tasks, announces them to the consumers
// and streams their weights as far ahead as the ring has room, across whatever the consumers still wait for; only the
// weights of a routed expert wait, for the router. The consumers wait for each task's events, run it, and count up.
//
// What a task writes is visible to the tasks that wait for it: its threads meet, one of them counts up with release
// order, the one that waits reads the counter with acquire order, and its threads meet again. With lists, that is for
// few tasks: a fence waits for all that the block has on its way, and that are the weights of the tasks to come. What
// the others write is tagged (tagged.h): they count up in no order, and who reads nothing else need not wait for events.
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
#include "ops/moe_topk.h"
#include "ops/rms_norm.h"
#include "ops/splitk_reduce.h"

namespace mk {

// ------------------------------------------------------------------------------------------------------------ producer

struct Next {
  int32_t task;  // -1: there are no more
  int32_t iteration;
  uint32_t word;  // the lane's word of the task's record
};

// Where a worker gets its tasks from: its own list, or the queue of ready tasks.
struct Source {
  static_assert(sizeof(Task) <= 4 * WAVE, "a word for each lane");
  const Params& p;
  int32_t first, count, entry, iteration;
  Next ahead;  // of the list: on its way from memory while the producer is busy with the one before

  MK_DEVICE explicit Source(const Params& p) : p(p), first(0), count(0), entry(0), iteration(0), ahead{-1, 0, 0} {
    if (p.dynamic) return;
    const int32_t* firsts = (const int32_t*)p.list_first + block();
    first = firsts[0];
    count = firsts[1] - first;
    look_ahead();
  }

  // False if the launch was given up.
  MK_DEVICE bool take(Next* next) {
    if (p.dynamic) return from_queue(next);
    *next = ahead;
    look_ahead();
    return true;
  }

  MK_DEVICE uint32_t word_of(int32_t task) const {
    return lane() < (int)(sizeof(Task) / 4) ? ((const uint32_t*)((const Task*)p.tasks + task))[lane()] : 0;
  }

  MK_DEVICE void look_ahead() {
    ahead = Next{-1, iteration, 0};
    if (count == 0 || iteration == p.iterations) return;
    ahead.task = ((const int32_t*)p.lists)[first + entry];
    ahead.word = word_of(ahead.task);
    if (++entry == count) entry = 0, ++iteration;
  }

  MK_DEVICE bool from_queue(Next* next) {
    int32_t task = -1, at = 0, alive = 1;
    if (lane() == 0) {
      uint32_t ticket = add_relaxed((uint32_t*)p.queue_ends, 1);
      at = (int32_t)(ticket / (uint32_t)p.num_tasks);
      if (at < p.iterations) {
        const uint64_t* slot = (const uint64_t*)p.queue + ticket % (uint32_t)p.num_tasks;
        Spin spin;
        uint64_t word;
        while ((word = load_acquire(slot)) >> 32 != (uint64_t)at + 1)
          if (!spin.again()) {
            alive = 0;
            break;
          }
        task = (int32_t)(uint32_t)word;
      }
    }
    *next = Next{shuffle_first(task), shuffle_first(at), 0};
    if (next->task >= 0) next->word = word_of(next->task);
    return shuffle_first(alive);
  }
};

// By all of a wave: the expert whose matrices a task reads, as soon as it is known; -1 if the task has nothing to do.
MK_DEVICE int expert_of(const Params& p, const Task& task, const Args& args, int iteration) {
  const Routing* routing = (const Routing*)(p.work + args.routing);
  if ((By)task.by == By::slot) return take(routing + task.at, tag_of(iteration)).expert;
  for (int i = 0; i < p.topk; ++i)
    if (take(routing + i, tag_of(iteration)).expert == task.at) return task.at;
  return -1;
}

// The producer's side of the ring. It takes some hundred cycles to begin a piece: where single threads can, there is a
// lane for each stage, so that many begin at once. Ahead of a task only a few are on their way at a time: whatever else
// the block reads or counts up, and others wait for, queues behind them.
struct Feeder {
  uint32_t pieces;  // of all streams so far
  uint32_t last;    // one more than the number of the piece that this lane's stage got last; 0: none yet

  // Brings a stream of task `n` of this worker into the ring. False if the launch was given up. `sure`: the task's input is
  // known to be there.
  MK_DEVICE bool feed(const Stream& s, uint32_t n, bool sure) {
    Shared& sh = shared();
    if constexpr (LANES_COPY) {
      const int stage = lane() < STAGES ? lane() : 0;
      uint32_t piece = pieces + ((uint32_t)stage + STAGES - pieces % STAGES) % STAGES;
      pieces += s.count;
      if (lane() >= STAGES) piece = pieces;
      const uint32_t first = pieces - s.count;
      Spin spin;
      while (wave_votes(piece < pieces)) {
        const bool flies = last && !gate_test(&sh.full[stage], (int)((last - 1) / STAGES & 1u));
        const bool runs = sure || gate_test(&sh.started[n % AHEAD], (int)(n / AHEAD & 1u));
        const int room = (runs ? STAGES : IN_FLIGHT) - count_ones(wave_votes(flies));
        // a stage is empty only when its piece has arrived, unless a launch that was given up did not wait for that
        bool begins = piece < pieces && !flies && gate_test(&sh.empty[stage], (int)((piece / STAGES + 1) & 1u));
        const uint64_t ready = wave_votes(begins);
        const uint64_t before = ready & ((1ull << stage) - 1), skipped = ready & ((1ull << first % STAGES) - 1);
        // the stream's first pieces first
        const int rank = count_ones(before) - count_ones(skipped) + (stage < (int)(first % STAGES) ? count_ones(ready) : 0);
        begins = begins && rank < room;
        // with EVERY_THREAD one lane after another: racecheck does not follow lanes that copy at once
        MK_UNROLL(1)
        for (int turn = EVERY_THREAD ? 0 : lane(); turn < (EVERY_THREAD ? STAGES : lane() + 1); ++turn) {
          if (begins && turn == lane()) {
            fetch(s, piece_of(s, (int)(piece - first)), sh.ring[stage], &sh.full[stage]);
            last = piece + 1;
            piece += STAGES;
          }
          if (EVERY_THREAD) wave_sync();
        }
        if (wave_votes(begins)) continue;
        rest();
        int alive = 1;
        if (lane() == 0) alive = spin.again();
        if (!shuffle_first(alive)) return false;
      }
    } else {
      for (int i = 0; i < s.count; ++i, ++pieces) {
        uint32_t stage = pieces % STAGES;
        if (!wave_gate_wait(&sh.empty[stage], pieces / STAGES + 1)) return false;
        fetch(s, piece_of(s, i), sh.ring[stage], &sh.full[stage]);
      }
    }
    return true;
  }

  // A block must not end while copies into its shared memory are on their way. They do arrive, so this needs no budget.
  MK_DEVICE void land() const {
    if constexpr (LANES_COPY) {
      if (last)
        while (!gate_test(&shared().full[lane()], (int)((last - 1) / STAGES & 1u))) rest();
    } else {
      for (uint32_t begun = pieces < STAGES ? 0 : pieces - STAGES; begun < pieces; ++begun)
        while (!gate_try_wait(&shared().full[begun % STAGES], (int)(begun / STAGES & 1u))) pause();
    }
  }
};

MK_DEVICE void produce(const Params& p) {
  Shared& sh = shared();
  Source source(p);
  Feeder feeder = {0, 0};
  State state = State::done;
  int32_t task_number = -1;
  for (uint32_t n = 0;; ++n) {
    const uint32_t slot = n % AHEAD, round = n / AHEAD;
    state = State::waiting;
    if (!wave_gate_wait(&sh.finished[slot], round + 1)) break;
    Next next;
    state = State::queue;
    if (!source.take(&next)) break;
    task_number = next.task;
    Stream stream = {}, second = {};
    int expert = 0;
    if (next.task >= 0) {
      if (lane() < (int)(sizeof(Task) / 4)) ((uint32_t*)&sh.task[slot])[lane()] = next.word;
      wave_sync();
      const Task& task = sh.task[slot];
      const uint32_t* words = (const uint32_t*)((const Args*)p.args + task.args);
      for (int i = lane(); i < (int)(sizeof(Args) / 4); i += WAVE) ((uint32_t*)&sh.args[slot])[i] = words[i];
      // the consumers would wait for these: they are far away, and it is late when they need them
      const int own = lane() - HELD;
      if (lane() < HELD && lane() < task.wait_count) {
        int event = ((const int32_t*)p.waits)[task.wait_first + lane()];
        sh.waits[slot][lane()] = event;
        sh.thresholds[slot][lane()] = (int32_t)threshold_of(p, event, next.iteration);
      } else if (own >= 0 && own < HELD && own < task.trigger_count) {
        sh.triggers[slot][own] = ((const int32_t*)p.triggers)[task.trigger_first + own];
      }
      wave_sync();
      const Args& args = sh.args[slot];
      if ((Input)args.input_kind == Input::norm && streams(task))
        for (int i = 64 * lane(); i < args.cols; i += 64 * WAVE) bring_near((const bf16*)(p.weights + args.norm) + i);
      if ((Code)task.code == Code::attn_chunk) {
        CacheStreams cache = cache_streams(p, task, args, next.iteration);
        stream = cache.rows;
        second = cache.turned;
      } else if (streams(task)) {
        stream = stream_of(p, task, args);
      }
      if ((By)task.by == By::expert) {
        // the consumers learn from the number of pieces whether the expert was chosen: if they looked for themselves they
        // could be done with the task, and with the token, before this wave had looked
        state = State::routing;
        expert = expert_of(p, task, args, next.iteration);
        if (shuffle_first(sh.dead)) break;
        if (expert < 0) stream.count = 0;
      }
    }
    if (lane() == 0) {
      sh.number[slot] = next.task;
      sh.iteration[slot] = next.iteration;
      sh.streams[slot][0] = stream;
      sh.streams[slot][1] = second;
    }
    wave_sync();
    if (EVERY_THREAD || lane() == 0) gate_arrive(&sh.announced[slot]);
    if (next.task < 0) {
      state = State::done;
      break;
    }
    if (!stream.count) continue;
    const Task& task = sh.task[slot];
    if ((Code)task.code == Code::attn_chunk) {
      // rows that this launch has written are complete when the iteration before this one has ended
      if (next.iteration > 0) {
        state = State::waiting;
        if (!wave_event_wait(p.launch_event, next.iteration)) break;
        copies_after_stores();
      }
    } else {
      if ((By)task.by == By::slot) {
        state = State::routing;
        expert = expert_of(p, task, sh.args[slot], next.iteration);
        if (shuffle_first(sh.dead)) break;
      }
      stream.matrix += expert * sh.args[slot].matrix_bytes;
      stream.matrix2 += expert * sh.args[slot].matrix_bytes;
    }
    state = State::streaming;
    bool fed = true;
    MK_UNROLL(1)
    while (fed && stream.count) {
      fed = feeder.feed(stream, n, task.flags & ROUTERS_INPUT);
      stream = second;
      second.count = 0;
    }
    if (!fed) break;
  }
  if (lane() == 0) {
    dump_of(p)->producer_state = (int32_t)state;
    dump_of(p)->producer_task = task_number;
  }
  feeder.land();
}

// ----------------------------------------------------------------------------------------------------------- consumers

// The ops that multiply share one product; what they do with its rows is theirs.
MK_DEVICE void execute(Consumer& c) {
  const int slot = c.slot;
  const Task& task = shared().task[slot];
  const Args& args = shared().args[slot];
  const Stream s = shared().streams[slot][0];
  if (streams(task) && s.count) {
    product(c, task, args, s);
    switch ((Code)task.code) {
      case Code::gemv: gemv(task, args, s, c.iteration); break;
      case Code::gemv_res: gemv_res(task, args, s, c.iteration); break;
      case Code::gemv_silu: gemv_silu(task, args, s, c.iteration); break;
      case Code::gemv_splitk: gemv_splitk(task, args, s); break;
      case Code::moe_gate_topk: moe_gate_topk(args, s, c.iteration); break;
      default: break;
    }
    return;
  }
  if (thread() == 0) gate_arrive(&shared().started[slot]);
  switch ((Code)task.code) {
    case Code::embedding: embedding(slot, c.iteration); break;
    case Code::rms_norm: rms_norm(slot, c.iteration); break;
    case Code::splitk_reduce: splitk_reduce(slot, c.iteration); break;
    case Code::mla_prep: mla_prep(slot, c.iteration); break;
    case Code::attn_chunk: c.pieces += attn_chunk(slot, c.iteration, c.pieces); break;
    case Code::attn_merge: attn_merge(slot, c.iteration); break;
    case Code::moe_topk: moe_topk(slot, c.iteration); break;
    case Code::moe_combine: moe_combine(slot, c.iteration); break;
    case Code::argmax_partial: argmax_partial(slot, c.iteration); break;
    case Code::argmax_reduce: argmax_reduce(slot, c.iteration); break;
    default: break;
  }
}

// By one thread: one more producer of an event is done. Notes the events that have fired by that.
MK_DEVICE void count_up(const Params& p, int event, int iteration, bool tagged) {
  Shared& sh = shared();
  uint32_t* counter = (uint32_t*)p.counters + event;
  if (!p.dynamic && tagged) {
    count_relaxed(counter);
  } else if (!p.dynamic) {
    add_release(counter, 1);
  } else if (add_acq_rel(counter, 1) + 1 == threshold_of(p, event, iteration)) {
    sh.fired[sh.fired_count % 8] = event;
    ++sh.fired_count;
  }
}

// All consumers: puts the tasks that waited for nothing but this event into the queue.
MK_CALL void put_ready(int event, int iteration) {
  const Params& p = shared().params;
  const int32_t* first = (const int32_t*)p.consumer_first + event;
  MK_UNROLL(1)
  for (int i = first[0] + thread(); i < first[1]; i += CONSUMERS) {
    int32_t task = ((const int32_t*)p.consumers)[i];
    uint32_t needed = (uint32_t)((const Task*)p.tasks)[task].wait_count * (uint32_t)(iteration + 1);
    if (add_acq_rel((uint32_t*)p.arrived + task, 1) + 1 != needed) continue;
    uint32_t end = add_relaxed((uint32_t*)p.queue_ends + 1, 1);
    uint64_t epoch = end / (uint32_t)p.num_tasks + 1;
    store_release((uint64_t*)p.queue + end % (uint32_t)p.num_tasks, epoch << 32 | (uint32_t)task);
  }
}

// All consumers meet here and get the same answer, though `dead` may change at any time. They meet once more before they come
// here again.
MK_DEVICE bool given_up() {
  Shared& sh = shared();
  if (thread() == 0) sh.stop = sh.dead;
  consumer_sync();
  return sh.stop;
}

// By one thread: until a task may begin.
MK_DEVICE void await(const Task& task, int slot, int iteration) {
  Shared& sh = shared();
  const Params& p = sh.params;
  // rows of the cache that are read where they are: a launch before has written them, or an iteration before this one
  if ((Code)task.code == Code::attn_chunk && iteration > 0 && !sh.streams[slot][0].count &&
      !event_wait(p.launch_event, threshold_of(p, p.launch_event, iteration), dump_of(p)))
    return;
  if ((task.flags & BY_TAGS) && !p.timeline) return;
  MK_UNROLL(1)
  for (int i = 0; i < task.wait_count; ++i) {
    int event = i < HELD ? sh.waits[slot][i] : ((const int32_t*)p.waits)[task.wait_first + i];
    uint32_t threshold = i < HELD ? (uint32_t)sh.thresholds[slot][i] : threshold_of(p, event, iteration);
    if (!event_wait(event, threshold, dump_of(p))) return;
  }
}

// Notes the first event of a task that has not fired, if there is one.
MK_DEVICE bool note_event(const Task& task, int iteration, Dump* dump) {
  const Params& p = shared().params;
  MK_UNROLL(1)
  for (int i = 0; i < task.wait_count; ++i) {
    const int event = ((const int32_t*)p.waits)[task.wait_first + i];
    const uint32_t threshold = threshold_of(p, event, iteration), value = load_relaxed((const uint32_t*)p.counters + event);
    if ((int32_t)(value - threshold) >= 0) continue;
    note(dump, event, value, threshold);
    return true;
  }
  return false;
}

// By one thread: a column of a task's line of the timeline.
MK_DEVICE void stamp(const Params& p, int task, int column, int64_t value) {
  ((int64_t*)p.timeline)[TIMELINE_WORDS * (int64_t)task + column] = value;
}

MK_DEVICE void consume(const Params& p) {
  Shared& sh = shared();
  Consumer c = {0, 0, 0};
  State state = State::idle;
  int32_t number = -1;
  for (uint32_t n = 0;; ++n) {
    const uint32_t slot = n % AHEAD;
    const Task& task = sh.task[slot];
    // what was not finished when the launch was given up is what the dump tells of
    if (!sh.dead) state = State::queue;
    if (EVERY_THREAD && thread()) gate_wait(&sh.announced[slot], n / AHEAD);
    // the others wait for this thread, and see what it has seen
    if (thread() == 0 && state == State::queue && gate_wait(&sh.announced[slot], n / AHEAD)) {
      number = sh.number[slot];
      c.iteration = sh.iteration[slot];
      if (number >= 0) state = State::waiting;
      if (number >= 0 && p.timeline) {
        stamp(p, number, 0, block());
        stamp(p, number, 1, nanoseconds());
      }
      if (number >= 0) await(task, (int)slot, c.iteration);
    }
    if (given_up()) break;
    number = sh.number[slot];
    c.iteration = sh.iteration[slot];
    if (number < 0) {
      state = State::done;
      break;
    }
    if (p.timeline && thread() == 0) stamp(p, number, 2, nanoseconds());
    state = State::streaming;
    c.slot = (int)slot;
    execute(c);
    consumer_sync();
    if (p.timeline && thread() == 0) stamp(p, number, 3, nanoseconds());
    if (thread() == 0) sh.fired_count = 0;
    if (thread() == 0 && !sh.dead) {
      MK_UNROLL(1)
      for (int i = 0; i < task.trigger_count; ++i)
        count_up(p, i < HELD ? sh.triggers[slot][i] : ((const int32_t*)p.triggers)[task.trigger_first + i], c.iteration,
                 task.flags & TAGGED);
      if ((Code)task.code == Code::terminate && c.iteration + 1 < p.iterations)
        count_up(p, p.launch_event, c.iteration + 1, false);
    }
    if (p.dynamic) {
      consumer_sync();
      MK_UNROLL(1)
      for (int i = 0; i < sh.fired_count; ++i) {
        bool begins = (Code)task.code == Code::terminate && sh.fired[i] == p.launch_event;
        put_ready(sh.fired[i], c.iteration + begins);
      }
      consumer_sync();
    }
    if (EVERY_THREAD || thread() == 0) gate_arrive(&sh.finished[slot]);
  }
  if (thread() == 0) {
    Dump* dump = dump_of(p);
    // in the middle of a task: it may wait for the tags of what an event stands for
    if (state == State::streaming && note_event(sh.task[c.slot], c.iteration, dump)) state = State::waiting;
    dump->state = (int32_t)state;
    dump->task = number;
    dump->iteration = c.iteration;
  }
}

MK_DEVICE void work(const Params& p) {
  Shared& sh = shared();
  if (thread() == 0) {
    sh.params = p;
    for (int i = 0; i < STAGES; ++i) {
      gate_init(&sh.full[i], 1);
      gate_init(&sh.empty[i], EVERY_THREAD ? CONSUMERS : TEAM_WAVES);
    }
    for (int i = 0; i < AHEAD; ++i) {
      gate_init(&sh.announced[i], EVERY_THREAD ? WAVE : 1);
      gate_init(&sh.started[i], 1);
      gate_init(&sh.finished[i], EVERY_THREAD ? CONSUMERS : 1);
    }
    gates_ready();
    consumer_sync_init();
    sh.dead = 0;
    *dump_of(p) = Dump{(int32_t)State::idle, 0, -1, -1, 0, 0, (int32_t)State::idle, -1};
  }
  block_sync();
  if (producing())
    produce(p);
  else
    consume(p);
}

}  // namespace mk
