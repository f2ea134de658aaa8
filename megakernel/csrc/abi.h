// Written by megakernel/abi.py, which explains each word; change that and run `python -m megakernel.abi`.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mk {

enum class Code : int32_t {
  nothing = 0,
  terminate = 1,
  embedding = 2,
  rms_norm = 3,
  gemv = 4,
  gemv_res = 5,
  gemv_silu = 6,
  gemv_splitk = 7,
  splitk_reduce = 8,
  mla_prep = 9,
  attn_chunk = 10,
  attn_merge = 11,
  moe_gate_topk = 12,
  moe_topk = 13,
  moe_combine = 14,
  argmax_partial = 15,
  argmax_reduce = 16,
};

enum class Input : int32_t { plain = 0, norm = 1, merge = 2 };

enum class Out : int32_t { bf16 = 0, fp32 = 1, logits = 2, kv_cache = 3 };

enum class By : int32_t { all = 0, expert = 1, slot = 2 };

enum class State : int32_t { idle = 0, waiting = 1, streaming = 2, routing = 3, queue = 4, done = 5 };

constexpr int32_t ABI_VERSION = 4;
constexpr int32_t APPENDS = 1, TAGGED = 2, BY_TAGS = 4;
constexpr int32_t ROUTERS_INPUT = 8;
constexpr int PARTIAL_STATS = 4;
constexpr int ALONE_CHUNKS = 64;
constexpr int TIMELINE_WORDS = 4;

struct Task {
  int32_t code;  // a Code
  int32_t op;  // number of the op, -1 for control; for messages only
  int32_t args;  // which Args
  int32_t tile;  // number in the op
  int32_t rows[2];  // output rows [first, end)
  int32_t chunk[2];  // columns of a split matrix or positions [first, end); both 0 if there is none
  int32_t by;  // a By: whether the expert `at` must be chosen, or slot `at` says which expert
  int32_t at;  // number of the expert or slot, of the split, or of the chunk of positions; else 0
  int32_t wait_first;  // its events in `waits`
  int32_t wait_count;
  int32_t trigger_first;  // the events that it counts up, in `triggers`
  int32_t trigger_count;
  int32_t flags;  // bits: APPENDS this position's row of the cache; what it writes is TAGGED; it goes BY_TAGS of what it reads; it multiplies the ROUTERS_INPUT
  int32_t pad;
};

struct Args {
  int64_t weight;  // matrix whose rows are multiplied, bytes into `weights`; -1 if none
  int64_t weight2;  // gemv_silu: that of up_proj
  int64_t matrix_bytes;  // bytes from one expert's matrix to the next one's
  int64_t norm;  // weight of the norm of the input, bytes into `weights`
  int64_t input;  // bytes into `work`
  int64_t input_bytes;  // bytes from one expert's or slot's input to the next one's
  int64_t out;  // bytes into `work`, for Out kv_cache into `cache`
  int64_t out_bytes;  // bytes from one expert's, slot's, or split's output to the next one's
  int64_t residual;  // bytes into `work`
  int64_t routing;  // the layer's Routing records, bytes into `work`
  int64_t kva;  // output of kv_a_proj_with_mqa [lora + rope], bytes into `work`
  int64_t latent;  // normed latent [lora], bytes into `work`; -1: norm that of kva
  int64_t query;  // output of q_proj [heads, nope + rope], bytes into `work`
  int64_t rotated;  // rotated parts of the queries [heads, rope], bytes into `work`; -1: rotate those of query
  int64_t absorbed;  // absorbed queries [heads, lora], bytes into `work`; -1: decompressed attention
  int64_t cache;  // kv cache or latent cache, bytes into `cache`
  int64_t rope_cache;  // rotated keys (decompressed only), bytes into `cache`
  int64_t shared;  // moe_combine: output of the shared experts, bytes into `work`
  int32_t cols;  // row length of the matrices, or elements that a small op works on
  int32_t input_kind;  // an Input: take it as it is, norm it, or merge the chunks of attention
  int32_t out_kind;  // an Out; logits are fp32, too, and go to the trace as well
  int32_t head_rows;  // rows for each head where heads have an input of their own; else 0
  int32_t head_stride;  // elements from one head's input to the next one's; merge: width of a head's output
  int32_t chunks;  // chunks of positions that a merge merges, or splits that a reduction adds
  int32_t cache_pitch;  // elements from one position of the cache to the next
  int32_t kv_eps;  // 1 if the norm is that of the latent
  int32_t slots;  // moe_combine: 1 if outputs are by slot, 0 if by expert
  int32_t parts;  // argmax: number of partials
};

struct Routing {
  uint32_t expert;  // its number in the upper half, the tag in the lower
  float weight;  // softmax probability times routed_scaling
};

struct Partial {
  double key;  // of its best group, relative to `largest`
  float largest;  // logit of its share of the vocabulary; NaN if that holds a NaN or +inf
  int32_t argmax;  // its lowest id with that logit
  int32_t drawn;  // the token drawn in its best group
  int32_t pad;
};

struct Dump {
  int32_t state;  // a State, of the threads that compute
  int32_t iteration;  // which token of the launch
  int32_t task;  // -1 before the first
  int32_t event;  // that it waits for, or -1
  uint32_t value;  // of the event's counter
  uint32_t threshold;  // that it waits for
  int32_t producer_state;  // a State, of the threads that fetch weights
  int32_t producer_task;
};

struct Params {
  uint64_t weights;  // arena of bf16 matrices and vectors
  uint64_t cache;  // arena of bf16 caches
  uint64_t work;  // arena of activations
  uint64_t rotary;  // fp32 [capacity, rope / 2, 2]: cosine and sine of each pair at each position
  uint64_t tasks;  // Task [num_tasks]
  uint64_t args;  // Args []
  uint64_t waits;  // i32 []: events
  uint64_t triggers;  // i32 []: events
  uint64_t thresholds;  // i32 [num_events]: for one token
  uint64_t list_first;  // i32 [workers + 1]: each worker's part of lists (static)
  uint64_t lists;  // i32 [num_tasks]: tasks
  uint64_t consumer_first;  // i32 [num_events + 1]: each event's part of consumers (dynamic)
  uint64_t consumers;  // i32 []: tasks
  uint64_t counters;  // u32 [num_events]: how often each event was counted up in this launch; zeroed before it
  uint64_t arrived;  // u32 [num_tasks]: how many of its events have fired (dynamic); zeroed
  uint64_t queue;  // i64 [num_tasks]: ring of ready tasks, task + (1 + tokens before) * 2**32 (dynamic); zeroed
  uint64_t queue_ends;  // u32 [2]: how many tasks were taken and put (dynamic); zeroed
  uint64_t forced;  // i32 [iterations]: token to read in place of the one sampled before, -1: that one
  uint64_t tokens;  // i32 [iterations]: the token sampled by each; -1 if a logit was NaN or +inf
  uint64_t times;  // i64 [iterations]: nanoseconds of the device's clock when each was sampled
  uint64_t trace;  // null or fp32 [iterations, vocab_size]: takes the logits
  uint64_t timeline;  // null or i64 [num_tasks, 4], TIMELINE of each task for the last token
  uint64_t abort;  // u32: not 0 ends the launch; zeroed
  uint64_t dump;  // Dump [workers]
  int64_t spin_budget;  // polls without progress after which a wait gives the launch up
  int64_t seed;  // of the sampling noise
  int64_t noise_position;  // position of the noise of the first token, as in fmms.sample
  int32_t num_tasks;
  int32_t num_events;
  int32_t workers;  // blocks of the launch
  int32_t dynamic;  // 0: lists, 1: ready queue
  int32_t iterations;  // tokens to decode
  int32_t position;  // of the first token that is read: positions already in the cache
  int32_t launch_event;  // counted up by the host and by the end of each token but the last
  int32_t hidden;  // hidden_size
  int32_t heads;  // num_attention_heads
  int32_t nope;  // qk_nope_head_dim
  int32_t rope;  // qk_rope_head_dim
  int32_t v;  // v_head_dim
  int32_t lora;  // kv_lora_rank
  int32_t experts;  // n_routed_experts
  int32_t topk;  // num_experts_per_tok
  int32_t vocab;  // vocab_size
  float eps;  // rms_norm_eps
  float kv_eps;  // of the norm of the latent
  float softmax_scale;  // what attention scores are multiplied by
  float routed_scale;  // routed_scaling_factor
  float temperature;  // 0: greedy
  int32_t pad;
};

// As megakernel.abi.layout(), by this compiler.
constexpr int32_t LAYOUT[] = {
  ABI_VERSION,
  (int32_t)sizeof(Task), (int32_t)offsetof(Task, code), (int32_t)offsetof(Task, op), (int32_t)offsetof(Task, args), (int32_t)offsetof(Task, tile), (int32_t)offsetof(Task, rows), (int32_t)offsetof(Task, chunk), (int32_t)offsetof(Task, by), (int32_t)offsetof(Task, at), (int32_t)offsetof(Task, wait_first), (int32_t)offsetof(Task, wait_count), (int32_t)offsetof(Task, trigger_first), (int32_t)offsetof(Task, trigger_count), (int32_t)offsetof(Task, flags), (int32_t)offsetof(Task, pad),
  (int32_t)sizeof(Args), (int32_t)offsetof(Args, weight), (int32_t)offsetof(Args, weight2), (int32_t)offsetof(Args, matrix_bytes), (int32_t)offsetof(Args, norm), (int32_t)offsetof(Args, input), (int32_t)offsetof(Args, input_bytes), (int32_t)offsetof(Args, out), (int32_t)offsetof(Args, out_bytes), (int32_t)offsetof(Args, residual), (int32_t)offsetof(Args, routing), (int32_t)offsetof(Args, kva), (int32_t)offsetof(Args, latent), (int32_t)offsetof(Args, query), (int32_t)offsetof(Args, rotated), (int32_t)offsetof(Args, absorbed), (int32_t)offsetof(Args, cache), (int32_t)offsetof(Args, rope_cache), (int32_t)offsetof(Args, shared), (int32_t)offsetof(Args, cols), (int32_t)offsetof(Args, input_kind), (int32_t)offsetof(Args, out_kind), (int32_t)offsetof(Args, head_rows), (int32_t)offsetof(Args, head_stride), (int32_t)offsetof(Args, chunks), (int32_t)offsetof(Args, cache_pitch), (int32_t)offsetof(Args, kv_eps), (int32_t)offsetof(Args, slots), (int32_t)offsetof(Args, parts),
  (int32_t)sizeof(Routing), (int32_t)offsetof(Routing, expert), (int32_t)offsetof(Routing, weight),
  (int32_t)sizeof(Partial), (int32_t)offsetof(Partial, key), (int32_t)offsetof(Partial, largest), (int32_t)offsetof(Partial, argmax), (int32_t)offsetof(Partial, drawn), (int32_t)offsetof(Partial, pad),
  (int32_t)sizeof(Dump), (int32_t)offsetof(Dump, state), (int32_t)offsetof(Dump, iteration), (int32_t)offsetof(Dump, task), (int32_t)offsetof(Dump, event), (int32_t)offsetof(Dump, value), (int32_t)offsetof(Dump, threshold), (int32_t)offsetof(Dump, producer_state), (int32_t)offsetof(Dump, producer_task),
  (int32_t)sizeof(Params), (int32_t)offsetof(Params, weights), (int32_t)offsetof(Params, cache), (int32_t)offsetof(Params, work), (int32_t)offsetof(Params, rotary), (int32_t)offsetof(Params, tasks), (int32_t)offsetof(Params, args), (int32_t)offsetof(Params, waits), (int32_t)offsetof(Params, triggers), (int32_t)offsetof(Params, thresholds), (int32_t)offsetof(Params, list_first), (int32_t)offsetof(Params, lists), (int32_t)offsetof(Params, consumer_first), (int32_t)offsetof(Params, consumers), (int32_t)offsetof(Params, counters), (int32_t)offsetof(Params, arrived), (int32_t)offsetof(Params, queue), (int32_t)offsetof(Params, queue_ends), (int32_t)offsetof(Params, forced), (int32_t)offsetof(Params, tokens), (int32_t)offsetof(Params, times), (int32_t)offsetof(Params, trace), (int32_t)offsetof(Params, timeline), (int32_t)offsetof(Params, abort), (int32_t)offsetof(Params, dump), (int32_t)offsetof(Params, spin_budget), (int32_t)offsetof(Params, seed), (int32_t)offsetof(Params, noise_position), (int32_t)offsetof(Params, num_tasks), (int32_t)offsetof(Params, num_events), (int32_t)offsetof(Params, workers), (int32_t)offsetof(Params, dynamic), (int32_t)offsetof(Params, iterations), (int32_t)offsetof(Params, position), (int32_t)offsetof(Params, launch_event), (int32_t)offsetof(Params, hidden), (int32_t)offsetof(Params, heads), (int32_t)offsetof(Params, nope), (int32_t)offsetof(Params, rope), (int32_t)offsetof(Params, v), (int32_t)offsetof(Params, lora), (int32_t)offsetof(Params, experts), (int32_t)offsetof(Params, topk), (int32_t)offsetof(Params, vocab), (int32_t)offsetof(Params, eps), (int32_t)offsetof(Params, kv_eps), (int32_t)offsetof(Params, softmax_scale), (int32_t)offsetof(Params, routed_scale), (int32_t)offsetof(Params, temperature), (int32_t)offsetof(Params, pad),
};

}  // namespace mk
