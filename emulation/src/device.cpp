// The kernels, compiled for the host, and what the tests call them through.

#include "cuda_emulation.h"

#include "../../kernels/power_norm.cu"
#include "probes.h"

#include <string>

// The runtime of Rust keeps memory to the end of the process: no leak.
extern "C" const char *__asan_default_options() {
  return "detect_leaks=0:quarantine_size_mb=16";
}
extern "C" const char *__ubsan_default_options() { return "print_stacktrace=1"; }

namespace {

struct Kernel {
  const char *name;
  unsigned max_threads; // of a block
  std::size_t params_size;
  void (*body)(const void *params);
};

#define KERNEL(NAME, THREADS, BLOCKS, BODY, PARAMS, ...)                                           \
  {#NAME, THREADS, sizeof(PARAMS),                                                                 \
   [](const void *params) { NAME(*static_cast<const PARAMS *>(params)); }},
#define PROBE(NAME, BODY)                                                                          \
  {NAME, emulation::MAX_THREADS, sizeof(ProbeParams),                                              \
   [](const void *params) { BODY(*static_cast<const ProbeParams *>(params)); }},

const Kernel KERNELS[] = {
    FOR_EACH_KERNEL(KERNEL)
    PROBE("probe_block_sum", probe_block_sum<true>)
    PROBE("probe_block_sum_without_barrier", probe_block_sum<false>)
    PROBE("probe_exchange_float", probe_exchange<float>)
    PROBE("probe_exchange_double", probe_exchange<double>)
    PROBE("probe_exchange_int64", probe_exchange<int64_t>)
    PROBE("probe_count", probe_count)
    PROBE("probe_order", probe_order)
    PROBE("probe_half_barrier", probe_half_barrier)
    PROBE("probe_two_barriers", probe_two_barriers)
    PROBE("probe_missing_lane", probe_missing_lane)
    PROBE("probe_past_global", probe_past_global)
    PROBE("probe_past_shared", probe_past_shared)
    PROBE("probe_overflow", probe_overflow)
    PROBE("probe_misaligned", probe_misaligned)
    PROBE("probe_stack", probe_stack)
};

thread_local std::string refusal;

} // namespace

// A launch, as src/device.rs hands it over.
struct EmulatedLaunch {
  const char *kernel;
  const void *params;
  std::size_t params_size;
  std::uint32_t grid_x, grid_y, block_x, block_y;
  std::uint32_t shared_bytes;
  std::uint32_t first_row, rows; // of blocks, to run
  emulation::Schedule schedule;
};

// Runs a launch. Null, or why a GPU would refuse it.
extern "C" const char *emulate_launch(const EmulatedLaunch *launch) {
  const auto refuse = [](const std::string &why) {
    refusal = why;
    return refusal.c_str();
  };
  const Kernel *kernel = nullptr;
  for (const Kernel &candidate : KERNELS) {
    if (std::strcmp(candidate.name, launch->kernel) == 0) {
      kernel = &candidate;
    }
  }
  if (kernel == nullptr) {
    return refuse("no such kernel");
  }
  if (launch->params_size != kernel->params_size) {
    return refuse("an argument of " + std::to_string(launch->params_size) + " bytes, not " +
                  std::to_string(kernel->params_size));
  }
  const std::uint64_t threads = std::uint64_t{launch->block_x} * launch->block_y;
  if (threads == 0 || threads > kernel->max_threads) {
    return refuse(std::to_string(threads) + " threads, where there can be 1 to " +
                  std::to_string(kernel->max_threads));
  }
  if (launch->grid_x == 0 || launch->grid_x > 0x7fffffffu || launch->grid_y == 0 ||
      launch->grid_y > 0xffffu || launch->first_row + launch->rows > launch->grid_y) {
    return refuse("a grid of " + std::to_string(launch->grid_x) + " x " +
                  std::to_string(launch->grid_y));
  }
  if (launch->shared_bytes > emulation::MAX_SHARED_BYTES) {
    return refuse(std::to_string(launch->shared_bytes) + " bytes of shared memory");
  }
  emulation::run_grid(kernel->name, kernel->body, launch->params,
                      {launch->grid_x, launch->grid_y, 1}, launch->first_row, launch->rows,
                      {launch->block_x, launch->block_y, 1}, launch->shared_bytes,
                      launch->schedule);
  return nullptr;
}

// The conversions of the half dtypes, for their tests.
extern "C" float emulated_half_to_float(std::uint16_t bits) { return __half2float({bits}); }
extern "C" std::uint16_t emulated_float_to_half(float value) { return __float2half_rn(value).bits; }
extern "C" float emulated_bfloat16_to_float(std::uint16_t bits) { return __bfloat162float({bits}); }
extern "C" std::uint16_t emulated_float_to_bfloat16(float value) {
  return __float2bfloat16_rn(value).bits;
}
