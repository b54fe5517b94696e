#include "bind/countdown.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/countdown.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// A countdown that calls a Python function for each buffer that is full.
//
// Threads: with the interpreter's lock; the function may let it go.
class Hooked {
 public:
  explicit Hooked(nb::object full) : full_(std::move(full)) {}

  void lay_out(const std::vector<std::vector<uint32_t>>& buffers_of, uint32_t n_buffers) {
    for (const auto& buffers : buffers_of)
      if (std::ranges::any_of(buffers, [&](uint32_t buffer) { return buffer >= n_buffers; }))
        throw std::invalid_argument("an entry names a buffer that does not exist");
    if (is_counting_) throw std::runtime_error("a buffer is being sent; lay it out afterwards");
    countdown.lay_out(buffers_of, n_buffers);
  }

  // False with Python's error set, if the function raised an exception.
  bool count(uint32_t entry) {
    if (entry >= countdown.n_entries()) {
      PyErr_Format(PyExc_IndexError, "entry %u of %zu", entry, countdown.n_entries());
      return false;
    }
    ++is_counting_;
    const bool counted = countdown.count(entry, [this](uint32_t buffer) {
      PyObject* number = PyLong_FromUnsignedLong(buffer);
      if (number == nullptr) return false;
      PyObject* result = PyObject_CallFunctionObjArgs(full_.ptr(), number, nullptr);
      Py_DECREF(number);
      Py_XDECREF(result);
      return result != nullptr;
    });
    --is_counting_;
    return counted;
  }

  Countdown countdown;

 private:
  nb::object full_;
  int is_counting_ = 0;
};

// The data bound to a hook.
struct Hook {
  std::shared_ptr<Hooked> hooked;
  uint32_t entry;
};

constexpr const char* kHook = "shoal hook";

// A plain C function: it costs no more than a builtin's call, whatever its arguments.
PyObject* call_hook(PyObject* self, PyObject* const* /*args*/, Py_ssize_t /*n_args*/) {
  const auto* hook = static_cast<const Hook*>(PyCapsule_GetPointer(self, kHook));
  if (hook == nullptr || !hook->hooked->count(hook->entry)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef kCallHook{"hook",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_hook)),
                      METH_FASTCALL, "Count an entry; arguments are ignored."};

nb::object make_hook(std::shared_ptr<Hooked> hooked, uint32_t entry) {
  if (entry >= hooked->countdown.n_entries()) throw nb::index_error("no such entry");
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHook));
  };
  auto hook = std::make_unique<Hook>(std::move(hooked), entry);
  const nb::object capsule = nb::steal(PyCapsule_New(hook.get(), kHook, destroy));
  if (!capsule.is_valid()) throw nb::python_error();
  hook.release();
  PyObject* function = PyCFunction_NewEx(&kCallHook, capsule.ptr(), nullptr);
  if (function == nullptr) throw nb::python_error();
  return nb::steal(function);
}

}  // namespace

void bind_countdown(nb::module_& m) {
  nb::class_<Hooked>(m, "Countdown")
      .def(nb::init<nb::object>(), nb::arg("full"))
      .def("lay_out", &Hooked::lay_out, nb::arg("buffers_of"), nb::arg("n_buffers"))
      .def("begin", [](Hooked& self) { self.countdown.begin(); })
      .def("hook", &make_hook)
      .def("count",
           [](Hooked& self, uint32_t entry) {
             if (!self.count(entry)) throw nb::python_error();
           })
      .def_prop_rw(
          "paused", [](const Hooked& self) { return self.countdown.paused; },
          [](Hooked& self, bool paused) { self.countdown.paused = paused; })
      .def_prop_ro("n_counted", [](const Hooked& self) { return self.countdown.order().size(); })
      .def("is_counted",
           [](const Hooked& self, uint32_t entry) {
             if (entry >= self.countdown.n_entries()) throw nb::index_error("no such entry");
             return self.countdown.is_counted(entry);
           })
      .def_prop_ro("order", [](const Hooked& self) { return self.countdown.order(); })
      .def_prop_ro("repeated", [](const Hooked& self) { return self.countdown.repeated(); })
      .def_prop_ro("first_ns", [](const Hooked& self) { return self.countdown.first_ns(); })
      .def_prop_ro("full_ns", [](const Hooked& self) { return self.countdown.full_ns(); });
}

}  // namespace shoal
