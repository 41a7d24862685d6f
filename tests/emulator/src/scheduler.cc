// Threads as fibers, and the choice of the next one.
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <vector_types.h>

#include <algorithm>

#include "machine.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 gridDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr long long kPatience = 20'000'000;  // turns without progress
constexpr int kTransferOdds = 1024;
constexpr int kWriteOdds = 8 * kTransferOdds;  // so that CTAs overtake writes that are not awaited
constexpr int kSleepOdds = 256;
constexpr int kLongestSleep = 4096;  // turns

struct Launch {
  std::string name;
  void (*kernel)(void**);
  void** arguments;
  std::vector<std::unique_ptr<Block>> blocks;  // on the machine
  Fiber* current = nullptr;
  std::jmp_buf scheduler;
  std::jmp_buf abort;
  std::string error;
  uint64_t turns = 0;
  long long idle_turns = 0;
  pthread_t os_thread;
};

Launch* launch = nullptr;
uint64_t random_state;

// Memory between inaccessible pages.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    bytes_ = (bytes + page_ - 1) / page_ * page_;
    base_ = static_cast<char*>(mmap(nullptr, bytes_ + 2 * page_, PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(base_ + page_, bytes_, PROT_READ | PROT_WRITE);
  }
  char* begin() const { return base_ + page_; }
  char* end() const { return begin() + bytes_; }

 private:
  size_t page_;
  size_t bytes_;
  char* base_;
};

// Stacks and shared memory are reused for later blocks.
std::vector<char*> free_stacks;

char* take_stack() {
  if (free_stacks.empty()) return Guarded(kStackBytes).begin();
  char* const stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

char* shared_memory(int slot, unsigned bytes) {
  static std::map<std::pair<int, unsigned>, char*> found;
  char*& memory = found[{slot, bytes}];
  if (memory == nullptr) {
    Guarded const guarded(bytes + kFirstSharedAddress);
    memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(guarded.end()) - bytes) /
                                     kFirstSharedAddress * kFirstSharedAddress);
  }
  return memory;
}

void enter_fiber() {
  launch->kernel(launch->arguments);
  Fiber& fiber = this_fiber();
  fiber.done = true;
  thread_exits(fiber);
  note_progress();
  std::longjmp(launch->scheduler, 1);
}

void resume(Fiber& fiber) {
  launch->current = &fiber;
  threadIdx = {unsigned(fiber.thread), 0, 0};
  blockIdx = {fiber.block->index, 0, 0};
  if (_setjmp(launch->scheduler) == 0) {
    if (fiber.started) std::longjmp(fiber.context, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, enter_fiber, 0);
    setcontext(&context);
  }
  launch->current = nullptr;
}

void suspend() {
  if (_setjmp(this_fiber().context) == 0) std::longjmp(launch->scheduler, 1);
}

bool can_run(Fiber const& fiber) { return !fiber.done && fiber.wait.over(); }

// Whether a lane of the warp can run. Most warps wait most of the time, and all lanes for the same
// barrier, so the conditions are collected when none of them holds.
bool has_lane_to_run(Block& block, int index) {
  Warp& warp = block.warps[index];
  if (warp.waits.empty()) {
    for (int lane = 0; lane < kLanes; ++lane) {
      Fiber const& fiber = block.fibers[index * kLanes + lane];
      if (fiber.done) continue;
      if (fiber.wait.over()) {
        warp.waits.clear();
        return true;
      }
      auto const is_same = [&](Wait const& wait) { return wait.is_for_same(fiber.wait); };
      if (std::none_of(warp.waits.begin(), warp.waits.end(), is_same)) {
        warp.waits.push_back(fiber.wait);
      }
    }
    return false;
  }
  return std::any_of(warp.waits.begin(), warp.waits.end(),
                     [](Wait const& wait) { return wait.over(); });
}

bool can_run(Block& block, int warp) {
  return block.warps[warp].asleep_until <= launch->turns && has_lane_to_run(block, warp);
}

void sleep(Warp& warp) { warp.asleep_until = launch->turns + random_number() % kLongestSleep; }

bool wake_all() {
  bool slept = false;
  for (auto const& block : launch->blocks) {
    for (Warp& warp : block->warps) {
      slept = slept || warp.asleep_until > launch->turns;
      warp.asleep_until = 0;
    }
  }
  return slept;
}

bool run_warp(Block& block, int warp) {
  if (random_number() % kSleepOdds == 0) sleep(block.warps[warp]);
  if (block.warps[warp].asleep_until > launch->turns) return false;
  int const first = int(random_number() % kLanes);
  if (!has_lane_to_run(block, warp)) return false;
  block.warps[warp].waits.clear();
  bool ran = false;
  for (int i = 0; i < kLanes; ++i) {
    Fiber& fiber = block.fibers[warp * kLanes + (first + i) % kLanes];
    if (!can_run(fiber)) continue;
    resume(fiber);
    ran = true;
  }
  return ran;
}

void run_transfer(std::vector<std::function<void()>>& pending) {
  auto const chosen = pending.begin() + long(random_number() % pending.size());
  std::function<void()> const transfer = std::move(*chosen);
  pending.erase(chosen);
  transfer();
  note_progress();
}

std::unique_ptr<Block> make_block(unsigned index, std::shared_ptr<Cluster> const& cluster, int slot,
                                  unsigned threads, unsigned shared_bytes) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->cluster = cluster;
  cluster->blocks.push_back(block.get());
  block->live = int(threads);
  block->shared = shared_memory(slot, shared_bytes);
  block->shared_bytes = int(shared_bytes);
  std::memset(block->shared, 0xff, shared_bytes);  // NaN in every format
  block->writers.assign((shared_bytes + 3) / 4, 0);
  block->warps.resize(threads / kLanes);
  block->fibers.resize(threads);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = block->fibers[thread];
    fiber.block = block.get();
    fiber.thread = int(thread);
    fiber.stack = take_stack();
  }
  return block;
}

void retire(Block& block) {
  if (!block.transfers.empty()) {
    fail("block %u ends while %zu TMA copies are in flight", block.index, block.transfers.size());
  }
  while (!block.writes.empty()) run_transfer(block.writes);
  for (Fiber& fiber : block.fibers) free_stacks.push_back(fiber.stack);
  for (Block*& other : block.cluster->blocks) {
    if (other == &block) other = nullptr;
  }
}

[[noreturn]] void fail_hanging() {
  std::map<std::string, int> waits;
  for (auto const& block : launch->blocks) {
    for (Fiber const& fiber : block->fibers) {
      if (fiber.done) continue;
      Wait const& wait = fiber.wait;
      std::string const number = wait.number < 0 ? "" : " " + std::to_string(wait.number);
      ++waits["block " + std::to_string(block->index) + " warp " +
              std::to_string(fiber.thread / kLanes) + " at " + wait.what + number];
    }
  }
  std::string text;
  for (auto const& [what, threads] : waits) {
    text += "; " + std::to_string(threads) + " threads of " + what;
  }
  fail("the kernel hangs%s", text.c_str());
}

// Runs one turn of a warp, or one pending copy.
void take_turn() {
  ++launch->turns;
  if (++launch->idle_turns > kPatience) fail_hanging();
  Block& block = *launch->blocks[random_number() % launch->blocks.size()];
  if (!block.transfers.empty() && random_number() % kTransferOdds == 0)
    run_transfer(block.transfers);
  if (!block.writes.empty() && random_number() % kWriteOdds == 0) run_transfer(block.writes);
  for (int attempt = 0; attempt < 8; ++attempt) {
    if (run_warp(block, int(random_number() % block.warps.size()))) return;
  }
  std::vector<std::pair<Block*, int>> able;
  for (auto const& any : launch->blocks) {
    for (int warp = 0; warp < int(any->warps.size()); ++warp) {
      if (can_run(*any, warp)) able.emplace_back(any.get(), warp);
    }
  }
  if (!able.empty()) {
    auto const [chosen, warp] = able[random_number() % able.size()];
    run_warp(*chosen, warp);
    return;
  }
  if (wake_all()) return;
  for (auto const& any : launch->blocks) {
    if (!any->transfers.empty()) return run_transfer(any->transfers);
    if (!any->writes.empty()) return run_transfer(any->writes);
  }
  fail_hanging();
}

void run_blocks(unsigned blocks, unsigned cluster, unsigned threads, unsigned shared_bytes) {
  unsigned const resident = std::max(unsigned(settings().multiprocessors), cluster);
  unsigned next = 0;
  std::vector<int> free_slots;
  for (unsigned slot = 0; slot < resident; ++slot) free_slots.push_back(int(slot));
  std::map<Block*, int> slots;
  while (next < blocks || !launch->blocks.empty()) {
    while (next < blocks && free_slots.size() >= cluster) {
      auto const together = std::make_shared<Cluster>();
      for (unsigned rank = 0; rank < cluster; ++rank) {
        launch->blocks.push_back(
            make_block(next++, together, free_slots.back(), threads, shared_bytes));
        slots[launch->blocks.back().get()] = free_slots.back();
        free_slots.pop_back();
      }
    }
    take_turn();
    for (size_t i = 0; i < launch->blocks.size(); ++i) {
      Block& block = *launch->blocks[i];
      if (block.live > 0) continue;
      retire(block);
      free_slots.push_back(slots[&block]);
      slots.erase(&block);
      launch->blocks.erase(launch->blocks.begin() + long(i));
      break;
    }
  }
}

// A wrong address or a division by zero in a kernel ends the launch instead of the process.
void on_signal(int signal, siginfo_t* info, void*) {
  if (launch == nullptr || !pthread_equal(pthread_self(), launch->os_thread)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  if (signal == SIGILL) {
    fail("a misaligned vector access, or another thing that C++ leaves undefined");
  } else if (signal == SIGFPE) {
    fail("a division by zero");
  }
  fail("an access to %p, outside of all buffers", info->si_addr);
}

class SignalHandlers {
 public:
  SignalHandlers() {
    static std::vector<char> stack(64 << 10);
    stack_t alternative = {};
    alternative.ss_sp = stack.data();
    alternative.ss_size = stack.size();
    sigaltstack(&alternative, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &action, &old_[i]);
  }
  ~SignalHandlers() {
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals = 4;
  static constexpr int kNumbers[kSignals] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction old_[kSignals];
  stack_t old_stack_;
};

}  // namespace

Settings& settings() {
  static Settings settings;
  return settings;
}

uint64_t random_number() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return random_state >> 33;
}

Fiber* current_fiber() { return launch->current; }
Fiber& this_fiber() { return *launch->current; }
Warp& this_warp() { return this_block().warps[this_fiber().thread / kLanes]; }

void note_progress() { launch->idle_turns = 0; }

void wait_for(Wait const& wait) {
  if (wait.over()) return;
  Fiber& fiber = this_fiber();
  fiber.wait = wait;
  suspend();
  fiber.wait.word = nullptr;
}

void yield() { suspend(); }

void stall() {
  if (random_number() % 2 == 0) return;
  sleep(this_warp());
  suspend();
}

void fail(char const* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  launch->error = launch->name + ": " + text;
  if (Fiber const* fiber = launch->current) {
    launch->error += " (block " + std::to_string(fiber->block->index) + ", thread " +
                     std::to_string(fiber->thread) + ")";
  }
  std::longjmp(launch->abort, 1);
}

std::string run_grid(std::string const& name, void (*kernel)(void**), void** arguments,
                     unsigned blocks, unsigned cluster, unsigned threads, unsigned shared_bytes) {
  if (blocks % cluster != 0) {
    return name + ": " + std::to_string(blocks) + " blocks do not form clusters of " +
           std::to_string(cluster);
  }
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> const lock(one_at_a_time);
  SignalHandlers const handlers;
  auto const running = std::make_unique<Launch>();
  running->name = name;
  running->kernel = kernel;
  running->arguments = arguments;
  running->os_thread = pthread_self();
  launch = running.get();
  random_state = settings().seed * 2654435761u + 12345;
  gridDim = dim3(blocks, 1, 1);
  if (_setjmp(running->abort) == 0) run_blocks(blocks, cluster, threads, shared_bytes);
  launch = nullptr;
  return running->error;
}

}  // namespace emulator
