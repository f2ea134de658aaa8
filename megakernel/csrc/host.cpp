// The launch on the host: one fibre for each thread of each block, and one operating-system thread that runs them.
//
// Which fibre goes on is drawn from the ones that can, and so is when an asynchronous copy arrives: a seed stands for an
// interleaving, and can be tried again. A fibre gives way only where the portable layer says that threads may: at
// shuffles, barriers, gates, and in loops that poll.
#include "api.h"

#include <stdlib.h>

#include <chrono>
#include <memory>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr int COPY_ODDS = 8;  // a copy that is on its way arrives at one in so many steps
constexpr int STORES_AT_ONCE = 64;  // so many relaxed stores at most, likewise

struct Block;

struct Fibre {
  Block* block = nullptr;
  int thread = 0;
  bool over = false;
  int place = -1;          // among the ones that can run, or -1
  int meetings = 0;        // of its wave that it took part in
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  std::unique_ptr<unsigned char[]> stack;
};

struct Meeting {
  int arrived = 0;
  std::vector<Fibre*> waiting;
};

struct Wave {
  Meeting meeting;
  uint64_t words[2][mk::WAVE];  // a fast thread can be one exchange ahead
};

struct Block {
  int index = 0;
  std::unique_ptr<mk::Shared> shared;
  std::vector<Wave> waves = std::vector<Wave>(mk::CONSUMER_WAVES + 1);
  Meeting consumers, all;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  mk::Gate* gate;
};

struct Store {
  void* to;
  uint64_t value;
  int bytes;
  int block;
};

struct Machine {
  const mk::Params* params = nullptr;
  uint64_t random = 1;
  std::vector<Fibre> fibres;
  std::vector<Block> blocks;
  std::vector<Fibre*> ready;
  std::vector<std::pair<mk::Gate*, Fibre*>> at_gates;
  std::vector<Copy> copies;
  std::vector<Store> stores;
  Fibre* current = nullptr;
#if defined(__x86_64__)
  void* stack_pointer = nullptr;  // of the scheduler
#else
  ucontext_t context;
#endif
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
};

thread_local Machine* machine = nullptr;  // launches in several threads know nothing of each other

uint32_t draw(uint32_t below) {  // xorshift64* (Marsaglia, 2003; Vigna, 2016)
  uint64_t x = machine->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  machine->random = x;
  return (uint32_t)(((x * 0x2545F4914F6CDD1Dull) >> 32) % below);
}

// ------------------------------------------------------------------------------------------------- switching stacks

#if defined(__x86_64__)
// Saves what a call must keep on the stack that is left, and takes up the other one.
extern "C" void mk_switch(void** leave, void* enter);
asm(R"(
.text
.globl mk_switch
.type mk_switch, @function
mk_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mk_switch, .-mk_switch
)");
#endif

void run_fibre();

void to_scheduler(bool over) {
  Fibre* self = machine->current;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(over ? nullptr : &fake, machine->stack_bottom, machine->stack_size);
#endif
  self->over = over;
#if defined(__x86_64__)
  mk_switch(&self->stack_pointer, machine->stack_pointer);
#else
  swapcontext(&self->context, &machine->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &machine->stack_bottom, &machine->stack_size);
#endif
}

void to_fibre(Fibre* fibre) {
  machine->current = fibre;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fibre->stack.get(), STACK_BYTES);
#endif
#if defined(__x86_64__)
  mk_switch(&machine->stack_pointer, fibre->stack_pointer);
#else
  swapcontext(&machine->context, &fibre->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void run_fibre() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine->stack_bottom, &machine->stack_size);
#endif
  mk::work(*machine->params);
  to_scheduler(true);
  abort();  // nobody goes on with it
}

void start(Fibre* fibre) {
  fibre->stack.reset(new unsigned char[STACK_BYTES]);
#if defined(__x86_64__)
  uintptr_t top = ((uintptr_t)fibre->stack.get() + STACK_BYTES) & ~(uintptr_t)15;
  void** frame = (void**)top;
  *--frame = nullptr;  // where run_fibre would return to; also leaves the stack as a call would
  *--frame = (void*)run_fibre;
  for (int i = 0; i < 6; ++i) *--frame = nullptr;
  fibre->stack_pointer = frame;
#else
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = STACK_BYTES;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, run_fibre, 0);
#endif
}

// ------------------------------------------------------------------------------------------------------- scheduling

void make_ready(Fibre* fibre) {
  if (fibre->place >= 0) return;
  fibre->place = (int)machine->ready.size();
  machine->ready.push_back(fibre);
}

void rest(Fibre* fibre) {
  if (fibre->place < 0) return;
  Fibre* last = machine->ready.back();
  machine->ready[fibre->place] = last;
  last->place = fibre->place;
  machine->ready.pop_back();
  fibre->place = -1;
}

void wake(mk::Gate* gate) {
  auto& waiting = machine->at_gates;
  for (size_t i = 0; i < waiting.size();) {
    if (gate && waiting[i].first != gate) {
      ++i;
      continue;
    }
    make_ready(waiting[i].second);
    waiting[i] = waiting.back();
    waiting.pop_back();
  }
}

void settle(mk::Gate* gate) {
  if (gate->left || gate->bytes) return;
  gate->left = gate->needed;
  gate->phase ^= 1;
  wake(gate);
}

void arrive_copy() {
  auto& copies = machine->copies;
  size_t at = draw((uint32_t)copies.size());
  Copy copy = copies[at];
  copies[at] = copies.back();
  copies.pop_back();
  memcpy(copy.to, copy.from, (size_t)copy.bytes);
  copy.gate->bytes -= copy.bytes;
  settle(copy.gate);
}

void arrive_store(size_t at) {
  auto& stores = machine->stores;
  const Store store = stores[at];
  stores[at] = stores.back();
  stores.pop_back();
  memcpy(store.to, &store.value, (size_t)store.bytes);  // little-endian
}

// False if nothing can ever go on: threads that the portable layer does not bring together wait for each other.
bool schedule() {
  size_t left = machine->fibres.size();
  while (left) {
    if (!machine->copies.empty() && (machine->ready.empty() || draw(COPY_ODDS) == 0)) arrive_copy();
    if (draw(COPY_ODDS) == 0)
      for (uint32_t i = draw(STORES_AT_ONCE); i && !machine->stores.empty(); --i)
        arrive_store(draw((uint32_t)machine->stores.size()));
    if (machine->ready.empty()) {
      if (machine->copies.empty() && machine->at_gates.empty()) return false;
      // nobody else could complete their gates now: let them look, and count it as a poll
      if (machine->copies.empty()) wake(nullptr);
      continue;
    }
    Fibre* fibre = machine->ready[draw((uint32_t)machine->ready.size())];
    to_fibre(fibre);
    if (fibre->over) {
      rest(fibre);
      fibre->stack.reset();
      --left;
    } else if (*(const uint32_t*)machine->params->abort) {
      wake(nullptr);
    }
  }
  while (!machine->stores.empty()) arrive_store(0);
  return true;
}

void wait_here() {
  rest(machine->current);
  to_scheduler(false);
}

void meet(Meeting& meeting, int size) {
  if (++meeting.arrived < size) {
    meeting.waiting.push_back(machine->current);
    wait_here();
    return;
  }
  meeting.arrived = 0;
  for (Fibre* fibre : meeting.waiting) make_ready(fibre);
  meeting.waiting.clear();
}

}  // namespace

namespace mk {
namespace host {

int thread_index() { return machine->current->thread; }
int block_index() { return machine->current->block->index; }

void meet(int group) {
  Block* block = machine->current->block;
  if (group == ALL)
    ::meet(block->all, THREADS);
  else if (group == CONSUMERS)
    ::meet(block->consumers, CONSUMER_WAVES * WAVE);
  else
    ::meet(block->waves[group].meeting, WAVE);
}

uint64_t exchange(uint64_t word, int lane) {
  Fibre* self = machine->current;
  Wave& wave = self->block->waves[self->thread / WAVE];
  uint64_t* words = wave.words[self->meetings++ & 1];
  words[self->thread % WAVE] = word;
  ::meet(wave.meeting, WAVE);
  return words[lane];
}

void yield() { to_scheduler(false); }

void* shared_bytes() { return machine->current->block->shared.get(); }

int64_t nanoseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void arrive(Gate* gate, int64_t bytes) {
  gate->bytes += bytes;
  --gate->left;
  settle(gate);
}

bool try_wait(Gate* gate, int odd) {
  if (gate->phase != odd) return true;
  machine->at_gates.emplace_back(gate, machine->current);
  wait_here();
  return gate->phase != odd;
}

void copy(void* to, const void* from, int bytes, Gate* gate) {
  memset(to, 0xff, (size_t)bytes);  // NaN in bf16
  machine->copies.push_back(Copy{to, from, bytes, gate});
}

void store_later(void* to, uint64_t value, int bytes) {
  // stores to the same place arrive in their order
  for (size_t i = 0; i < machine->stores.size(); ++i)
    if (machine->stores[i].to == to) {
      arrive_store(i);
      break;
    }
  machine->stores.push_back(Store{to, value, bytes, block_index()});
}

void stores_arrive() {
  for (size_t i = 0; i < machine->stores.size();)
    if (machine->stores[i].block == block_index())
      arrive_store(i);
    else
      ++i;
}

}  // namespace host
}  // namespace mk

namespace {

bool untouched(const uint64_t* guard, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof *guard; ++i)
    if (guard[i] != ~(uint64_t)0) return false;
  return true;
}

}  // namespace

// Runs a launch to its end in the interleaving that the seed stands for. 0, or 1 if threads wait for each other at a
// barrier, which no budget ends; 2, 3, 4 if something wrote past x, slots or scratch.
extern "C" int mk_launch(const mk::Params* params, uint64_t seed) {
  Machine here;
  machine = &here;
  here.params = params;
  here.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
  if (!here.random) here.random = 1;
  here.blocks.resize((size_t)params->workers);
  here.fibres.resize((size_t)params->workers * mk::THREADS);
  for (int b = 0; b < params->workers; ++b) {
    Block& block = here.blocks[(size_t)b];
    block.index = b;
    block.shared.reset(new mk::Shared);
    memset((void*)block.shared.get(), 0xff, sizeof(mk::Shared));
    for (int t = 0; t < mk::THREADS; ++t) {
      Fibre* fibre = &here.fibres[(size_t)b * mk::THREADS + t];
      fibre->block = &block;
      fibre->thread = t;
      start(fibre);
      make_ready(fibre);
    }
  }
  bool ended = schedule();
  machine = nullptr;
  if (!ended) return 1;
  for (const Block& block : here.blocks) {
    const mk::Shared& shared = *block.shared;
    if (!untouched(shared.x_guard, sizeof shared.x_guard)) return 2;
    if (!untouched(shared.slots_guard, sizeof shared.slots_guard)) return 3;
    if (!untouched(shared.scratch_guard, sizeof shared.scratch_guard)) return 4;
  }
  return 0;
}
