// Plain data of any shape, as JSON has it, for people and programs to read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shoal {

struct Value;
using List = std::vector<Value>;
using Fields = std::vector<std::pair<std::string_view, Value>>;  // names are literals

struct Value {
  std::variant<std::monostate, bool, int64_t, double, std::string, List, Fields> is;

  Value() = default;
  Value(bool flag) : is(flag) {}
  Value(int number) : is(int64_t{number}) {}
  Value(uint32_t number) : is(int64_t{number}) {}
  Value(int64_t number) : is(number) {}
  Value(uint64_t number) : is(static_cast<int64_t>(number)) {}  // counts: all far below 2^63
  Value(double number) : is(number) {}
  Value(const char* text) : is(std::string(text)) {}
  Value(std::string text) : is(std::move(text)) {}
  Value(List list) : is(std::move(list)) {}
  Value(Fields fields) : is(std::move(fields)) {}
};

}  // namespace shoal
