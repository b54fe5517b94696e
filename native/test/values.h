// Fields of a rank's reported state, by name.
#pragma once

#include <string>
#include <string_view>

#include "base/value.h"
#include "test/check.h"

namespace shoal::test {

inline const Value& at(const Value& value, std::string_view name) {
  static const Value nothing;
  for (const auto& [field, one] : std::get<Fields>(value.is))
    if (field == name) return one;
  fail(__FILE__, __LINE__, "there is no field " + std::string(name));
  return nothing;
}
inline const List& list(const Value& value, std::string_view name) {
  return std::get<List>(at(value, name).is);
}
inline int64_t number(const Value& value, std::string_view name) {
  return std::get<int64_t>(at(value, name).is);
}
inline const std::string& text(const Value& value, std::string_view name) {
  return std::get<std::string>(at(value, name).is);
}

}  // namespace shoal::test
