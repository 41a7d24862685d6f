// The Python module jax_memeff._ffi: the handlers as capsules for jax.ffi.
#include <pybind11/pybind11.h>

#include "call.h"
#include "handlers.h"

namespace {

namespace py = pybind11;

py::capsule capsule(XLA_FFI_Handler* handler) {
  return py::capsule(reinterpret_cast<void*>(handler));
}

py::dict targets() {
  py::dict result;
  for (const memeff::host::Target& target : memeff::host::targets()) {
    py::dict stages;
    stages["instantiate"] = capsule(target.instantiate);
    stages["initialize"] = capsule(target.initialize);
    stages["execute"] = capsule(target.execute);
    result[target.name] = stages;
  }
  return result;
}

py::dict call_type() {
  py::dict result;
  result["type_id"] = py::capsule(static_cast<void*>(memeff::host::call_type_id()));
  result["type_info"] = py::capsule(static_cast<const void*>(memeff::host::call_type_info()));
  return result;
}

int64_t checksum(std::string_view bytes) {
  return static_cast<int64_t>(memeff::host::checksum(bytes));
}

}  // namespace

// The functions only read constants, so they need no GIL in a free-threaded interpreter.
PYBIND11_MODULE(_ffi, module, py::mod_gil_not_used()) {
  module.doc() = "XLA FFI handlers of jax_memeff.";
  module.def("targets", &targets, "name -> {stage: capsule}, for jax.ffi.register_ffi_target");
  module.def("checksum", &checksum, "of the bytes of a call's attributes and kernels, signed");
  module.def("call_type", &call_type, "for jax.ffi.register_ffi_type");
}
