// CUDA's execution model on the host: a block's threads are fibers of the calling thread, one block at a time.
//
// A fiber runs until it waits, at a barrier or for the lanes of its warp; in which order those that can go on
// do so is the schedule's choice. All state is a host thread's own, so that host threads emulate side by side.
//
// What a GPU would leave undefined ends the process with a message: a barrier that not all threads of the
// block reach, an exchange that not all lanes of the warp reach, or threads that meet from different lines.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h> // <cmath> alone leaves out the overloads without std::
#include <numeric>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

// For what runs at each switch, and touches the emulation's own memory only.
#define EMULATION_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
// Dynamic shared memory is all there is: `extern __shared__ __align__(16) unsigned char shared_memory[]`.
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};

static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
// The most shared memory a launch gets unless its launcher asks the driver for more, which ours does not.
constexpr unsigned MAX_SHARED_BYTES = 48 << 10;
// Frames are larger than on a GPU, and a sanitizer's report is written on the stack of the fiber it is about.
constexpr std::size_t STACK_BYTES = 256 << 10;

} // namespace emulation

alignas(16) thread_local unsigned char shared_memory[emulation::MAX_SHARED_BYTES];

namespace emulation {

// The order in which blocks run, or the threads of a block that can go on.
enum Order : std::uint32_t { FORWARD = 0, REVERSE = 1, SHUFFLED = 2 };

// Numbers for shuffles (splitmix64).
struct Random {
  std::uint64_t state;

  unsigned below(unsigned bound) {
    state += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return static_cast<unsigned>(((z ^ z >> 31) >> 32) * bound >> 32);
  }
};

inline void shuffle(std::vector<unsigned> &order, Random &random) {
  for (unsigned i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random.below(i)]);
  }
}

inline std::vector<unsigned> ordered(unsigned count, Order order, Random &random) {
  std::vector<unsigned> result(count);
  std::iota(result.begin(), result.end(), 0u);
  if (order == REVERSE) {
    std::iota(result.rbegin(), result.rend(), 0u);
  } else if (order == SHUFFLED) {
    shuffle(result, random);
  }
  return result;
}

// A place in a kernel's source, and what happens there.
struct Place {
  const char *what;
  const char *file;
  int line;
};

// Where threads meet: the last of `size` to arrive opens it for all.
struct Meeting {
  unsigned arrived = 0;
  unsigned opened = 0; // times
  Place place = {};    // of the first to arrive
};

// A stack of its own, and where on it a computation stopped.
#ifdef __x86_64__
struct Context {
  void *stack_pointer;
};

// Leaves `from`, to come back there when something switches to it, and goes on in `to`. What a called function
// must preserve lies on the stack; the rest the compiler expects to change.
extern "C" void emulation_switch(Context *from, const Context *to);
asm(R"(
.pushsection .text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulation_switch, .-emulation_switch
.popsection
)");

// Switching to `context` calls `entry`, which must not return, on the stack that ends at `end`.
inline void prepare(Context &context, unsigned char *end, void (*entry)()) {
  constexpr int REGISTERS = 6;
  // Below the address to return to, which `entry` takes for its caller's: there is none. So placed, the
  // stack is aligned as at any function's start.
  void **top = reinterpret_cast<void **>(end) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void *>(entry);
  std::memset(top - REGISTERS, 0, REGISTERS * sizeof(void *));
  context.stack_pointer = top - REGISTERS;
}
#else
struct Context {
  ucontext_t registers;
};

inline void emulation_switch(Context *from, const Context *to) {
  swapcontext(&from->registers, &to->registers);
}

inline void prepare(Context &context, unsigned char *end, void (*entry)()) {
  getcontext(&context.registers);
  // Stacks end short of what is theirs.
  context.registers.uc_stack.ss_sp = end - STACK_BYTES / 2;
  context.registers.uc_stack.ss_size = STACK_BYTES / 2;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}
#endif

// Stacks, each with a page below it that nothing may touch; kept for the next launch.
class Stacks {
  static constexpr std::size_t CACHE_STEP = 17 * 64, CACHE_SPREAD = 64 << 10;
  unsigned char *base = nullptr;

public:
  ~Stacks() {
    if (base != nullptr) {
      munmap(base, MAX_THREADS * STACK_BYTES);
    }
  }

  // Where stack i ends, and so begins to fill: elsewhere in each, or their hot ends would compete for the same
  // places in the cache.
  unsigned char *end(unsigned i) {
    if (base == nullptr) {
      void *memory = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) {
        std::perror("emulation: no memory for stacks");
        std::abort();
      }
      base = static_cast<unsigned char *>(memory);
      for (unsigned stack = 0; stack < MAX_THREADS; ++stack) {
        mprotect(base + stack * STACK_BYTES, sysconf(_SC_PAGESIZE), PROT_NONE);
      }
    }
    return base + (i + 1) * STACK_BYTES - i * CACHE_STEP % CACHE_SPREAD;
  }
};

struct Thread {
  Context context;
  dim3 index;
  // Where it waits, until `meeting` opens once more than `opened` times; null if it does not.
  const Meeting *meeting;
  unsigned opened;
  Place place;
  bool ended;
};

struct Warp {
  Meeting meeting;
  // What the lanes give. A lane may be one exchange ahead of those that have yet to read, never two.
  alignas(8) unsigned char values[2][WARP][8];
};

// What a host thread emulates at the moment.
struct Machine {
  Stacks stacks;
  Context scheduler;
  Thread threads[MAX_THREADS];
  Warp warps[MAX_THREADS / WARP];
  Meeting barrier;
  unsigned size; // threads of the block
  Thread *running;
  const char *kernel;
  void (*body)(const void *params);
  const void *params;
};

static thread_local Machine machine;

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char *format, ...) {
  std::fprintf(stderr, "emulation: %s, block (%u, %u): ", machine.kernel, blockIdx.x, blockIdx.y);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

// The calling thread waits until `count` threads are at the meeting.
EMULATION_UNCHECKED inline void meet(Meeting &meeting, unsigned count, const Place &place) {
  if (meeting.arrived == 0) {
    meeting.place = place;
  } else if (meeting.place.line != place.line || meeting.place.file != place.file ||
             meeting.place.what != place.what) {
    fail("thread (%u, %u) is at %s of %s:%d, where others are at %s of %s:%d", threadIdx.x,
         threadIdx.y, place.what, place.file, place.line, meeting.place.what, meeting.place.file,
         meeting.place.line);
  }
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.opened;
    return;
  }
  Thread &thread = *machine.running;
  thread.meeting = &meeting;
  thread.opened = meeting.opened;
  thread.place = place;
  emulation_switch(&thread.context, &machine.scheduler);
}

inline unsigned lane() { return (machine.running - machine.threads) % WARP; }

// Every lane of the warp gives a value and takes that of lane `from`.
template <typename T>
T exchange(unsigned mask, T value, unsigned from, const Place &place) {
  static_assert(sizeof(T) <= sizeof(machine.warps[0].values[0][0]), "a value of 8 bytes at most");
  const unsigned thread = machine.running - machine.threads;
  if (mask != 0xffffffffu || machine.size % WARP != 0) {
    fail("thread (%u, %u): %s of %s:%d without all 32 lanes (mask %x, block of %u)", threadIdx.x,
         threadIdx.y, place.what, place.file, place.line, mask, machine.size);
  }
  Warp &warp = machine.warps[thread / WARP];
  auto &values = warp.values[warp.meeting.opened % 2];
  std::memcpy(values[thread % WARP], &value, sizeof(T));
  meet(warp.meeting, WARP, place);
  std::memcpy(&value, values[from], sizeof(T));
  return value;
}

inline void run_thread() {
  machine.body(machine.params);
  Thread &thread = *machine.running;
  thread.ended = true;
  emulation_switch(&thread.context, &machine.scheduler);
}

[[noreturn]] inline void report_deadlock() {
  unsigned ended = 0, waiting = 0;
  const Thread *first = nullptr;
  for (unsigned i = 0; i < machine.size; ++i) {
    const Thread &thread = machine.threads[i];
    ended += thread.ended;
    waiting += !thread.ended;
    if (!thread.ended && first == nullptr) {
      first = &thread;
    }
  }
  fail("thread (%u, %u) waits at %s of %s:%d for threads that never come: of %u, %u wait and %u have ended",
       first->index.x, first->index.y, first->place.what, first->place.file, first->place.line,
       machine.size, waiting, ended);
}

// Runs the block blockIdx. `order` is of its threads, and redrawn each time round if `redraws`.
EMULATION_UNCHECKED inline void run_block(std::vector<unsigned> &order, bool redraws,
                                          Random &random) {
  for (unsigned i = 0; i < machine.size; ++i) {
    Thread &thread = machine.threads[i];
    thread.index = {i % blockDim.x, i / blockDim.x, 0};
    thread.meeting = nullptr;
    thread.ended = false;
    prepare(thread.context, machine.stacks.end(i), run_thread);
  }
  for (unsigned live = machine.size; live > 0;) {
    bool progress = false;
    for (unsigned i : order) {
      Thread &thread = machine.threads[i];
      if (thread.ended || (thread.meeting != nullptr && thread.meeting->opened == thread.opened)) {
        continue;
      }
      progress = true;
      thread.meeting = nullptr;
      threadIdx = thread.index;
      machine.running = &thread;
      emulation_switch(&machine.scheduler, &thread.context);
      live -= thread.ended;
    }
    if (!progress) {
      report_deadlock();
    }
    if (redraws) {
      shuffle(order, random);
    }
  }
}

// In which order blocks run, and their threads.
struct Schedule {
  Order blocks;
  Order threads;
  std::uint64_t seed;
};

// Runs `rows` rows of the blocks of a grid, which may be too large to run whole.
inline void run_grid(const char *kernel, void (*body)(const void *), const void *params, dim3 grid,
                     unsigned first_row, unsigned rows, dim3 block, unsigned shared_bytes,
                     const Schedule &schedule) {
  Random random = {schedule.seed};
  machine.kernel = kernel;
  machine.body = body;
  machine.params = params;
  machine.size = block.x * block.y;
  gridDim = grid;
  blockDim = block;
  std::vector<unsigned> threads = ordered(machine.size, schedule.threads, random);
  ASAN_POISON_MEMORY_REGION(shared_memory + shared_bytes, MAX_SHARED_BYTES - shared_bytes);
  for (unsigned i : ordered(grid.x * rows, schedule.blocks, random)) {
    blockIdx = {i % grid.x, first_row + i / grid.x, 0};
    // NaN in every dtype: nothing may be read before it is written.
    std::memset(shared_memory, 0xff, shared_bytes);
    run_block(threads, schedule.threads == SHUFFLED, random);
  }
  ASAN_UNPOISON_MEMORY_REGION(shared_memory, MAX_SHARED_BYTES);
}

} // namespace emulation

// What threads of a kernel call. Defaults name the line of the call.

inline void __syncthreads(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::meet(emulation::machine.barrier, emulation::machine.size, {"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, const char *file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  emulation::exchange(mask, 0, emulation::lane(), {"__syncwarp", file, line});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, const char *file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  return emulation::exchange(mask, value, from % emulation::WARP, {"__shfl_sync", file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, const char *file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  const unsigned from = emulation::lane() + step;
  return emulation::exchange(mask, value, from < emulation::WARP ? from : emulation::lane(),
                             {"__shfl_down_sync", file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, const char *file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  return emulation::exchange(mask, value, (emulation::lane() ^ lanes) % emulation::WARP,
                             {"__shfl_xor_sync", file, line});
}

template <typename T> T __ldg(const T *from) { return *from; }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// Threads of one host thread take turns between meetings, so that a plain access is atomic.
template <typename T> T atomicAdd(T *to, T value) {
  static_assert(!std::is_floating_point<T>::value, "the order would show in the result");
  const T old = *to;
  *to += value;
  return old;
}
