// Bytes as tests write them.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace shoal::test {

inline std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

inline std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte one : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(one >> 4)];
    text += "0123456789abcdef"[std::to_integer<int>(one & std::byte{15})];
  }
  return text;
}

}  // namespace shoal::test
