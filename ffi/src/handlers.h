// The handlers that the module registers with XLA.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// A custom call target and the handlers of its stages.
struct Target {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

std::vector<Target> targets();

// The state that instantiate returns; XLA fills in the id when the type is registered.
XLA_FFI_TypeId* call_type_id();
const XLA_FFI_TypeInfo* call_type_info();

}  // namespace memeff::host
