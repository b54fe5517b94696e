// Plain native data as Python's own.
#pragma once

#include <nanobind/nanobind.h>

#include "base/value.h"

namespace shoal {

inline nanobind::object python_of(const Value& value) {
  namespace nb = nanobind;
  struct Maker {
    nb::object operator()(std::monostate) const { return nb::none(); }
    nb::object operator()(bool flag) const { return nb::bool_(flag); }
    nb::object operator()(int64_t number) const { return nb::int_(number); }
    nb::object operator()(double number) const { return nb::float_(number); }
    nb::object operator()(const std::string& text) const {
      // Names come from hosts, which may contain any bytes.
      PyObject* decoded =
          PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
      if (decoded == nullptr) throw nb::python_error();
      return nb::steal(decoded);
    }
    nb::object operator()(const List& list) const {
      nb::list made;
      for (const Value& one : list) made.append(python_of(one));
      return made;
    }
    nb::object operator()(const Fields& fields) const {
      nb::dict made;
      for (const auto& [name, one] : fields)
        made[nb::str(name.data(), name.size())] = python_of(one);
      return made;
    }
  };
  return std::visit(Maker{}, value.is);
}

}  // namespace shoal
