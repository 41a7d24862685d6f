// The XLA FFI handlers: one custom call target per direction, with three stages each.
//
//   instantiate  decodes and checks the attributes and loads the kernels, once per call site
//   initialize   prepares the kernel for the device, once per device
//   execute      compares the types of the buffers with the attributes, fills the parameters and
//                launches. Hazard: it must not allocate, read back or wait, because XLA captures
//                the call into command buffers
#include "handlers.h"

#include "launch.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

// Runs a stage and returns its failure.
template <class Stage>
ffi::Error run(const Stage& stage) {
  try {
    stage();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(failure.code, failure.message);
  }
}

template <Direction kDirection>
ffi::ErrorOr<std::unique_ptr<Call>> instantiate(ffi::Dictionary attributes) {
  std::unique_ptr<Call> call;
  ffi::Error error = run([&] { call = Call::decode(kDirection, attributes); });
  if (error.failure()) return ffi::Unexpected(error);
  return call;
}

ffi::Error initialize(Call* call, ffi::Dictionary, ffi::RemainingArgs, ffi::RemainingRets) {
  return run([&] { call->kernels.resolve(); });
}

template <auto kLaunch>
ffi::Error execute(CUstream stream, Call* call, ffi::Dictionary, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results) {
  return run([&] {
    const DeviceKernel& kernel = call->kernels.resolve();
    kLaunch(*call, kernel, Buffers(*call, *kernel.kernel, arguments, results), stream);
  });
}

// Bindings. The later stages do not read the attributes, but a binding must name everything that a
// call carries.
auto bind_execute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::State<Call>>()
      .Attrs()
      .RemainingArgs()
      .RemainingRets();
}

auto bind_initialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<ffi::State<Call>>()
      .Attrs()
      .RemainingArgs()
      .RemainingRets();
}

constexpr auto kTraits = {ffi::Traits::kCmdBufferCompatible};

XLA_FFI_DEFINE_HANDLER(kInstantiateForward, instantiate<Direction::kForward>,
                       ffi::Ffi::BindInstantiate().Attrs(), kTraits);
XLA_FFI_DEFINE_HANDLER(kInstantiateBackward, instantiate<Direction::kBackward>,
                       ffi::Ffi::BindInstantiate().Attrs(), kTraits);
XLA_FFI_DEFINE_HANDLER(kInstantiateTangent, instantiate<Direction::kTangent>,
                       ffi::Ffi::BindInstantiate().Attrs(), kTraits);
XLA_FFI_DEFINE_HANDLER(kInitialize, initialize, bind_initialize(), kTraits);
XLA_FFI_DEFINE_HANDLER(kForward, execute<launch_forward>, bind_execute(), kTraits);
XLA_FFI_DEFINE_HANDLER(kBackward, execute<launch_backward>, bind_execute(), kTraits);
XLA_FFI_DEFINE_HANDLER(kTangent, execute<launch_tangent>, bind_execute(), kTraits);

}  // namespace

std::vector<Target> targets() {
  return {{"jax_memeff_forward", kInstantiateForward, kInitialize, kForward},
          {"jax_memeff_backward", kInstantiateBackward, kInitialize, kBackward},
          {"jax_memeff_tangent", kInstantiateTangent, kInitialize, kTangent}};
}

XLA_FFI_TypeId* call_type_id() { return &Call::id; }

const XLA_FFI_TypeInfo* call_type_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Call>();
  return &info;
}

}  // namespace memeff::host
