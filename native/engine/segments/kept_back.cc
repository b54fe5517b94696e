#include "engine/segments/kept_back.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace shoal {
namespace {

// What rounding takes from one block; nothing for a block that is not finite.
void round_block(const Narrow& codec, float* data, float* kept, size_t n_elems) {
  float whole[4096];
  uint32_t top = 0;  // an infinity and NaN have all bits of the exponent
  for (size_t i = 0; i < n_elems; ++i) {
    whole[i] = data[i] + kept[i];
    top = std::max(top, std::bit_cast<uint32_t>(whole[i]) & 0x7f800000);
  }
  std::memcpy(data, whole, n_elems * sizeof(float));
  codec.round(codec, reinterpret_cast<std::byte*>(data), n_elems);
  if (top == 0x7f800000) return;
  for (size_t i = 0; i < n_elems; ++i) kept[i] = whole[i] - data[i];
}

}  // namespace

void KeptBack::round(const Narrow& codec, Subject subject, uint64_t tensor_bytes, uint64_t first,
                     std::byte* data, size_t n_elems) {
  if (step_of(subject) == 1) forget(subject);
  const bool is_named = subject != 0 && step_of(subject) != 1 && codec.block <= 4096;
  std::vector<float>* const kept =
      is_named ? part_of(subject, tensor_bytes, first, n_elems) : nullptr;
  if (kept == nullptr) return codec.round(codec, data, n_elems);
  for (size_t at = 0; at < n_elems; at += codec.block)
    round_block(codec, reinterpret_cast<float*>(data) + at, kept->data() + at,
                std::min<size_t>(codec.block, n_elems - at));
}

std::vector<float>* KeptBack::part_of(Subject subject, uint64_t tensor_bytes, uint64_t first,
                                      size_t n) {
  OfBuffer& buffer = buffers_[without_step(subject)];
  if (buffer.tensor_bytes != tensor_bytes) drop(buffer);
  buffer.tensor_bytes = tensor_bytes;
  buffer.last_use = ++n_uses_;
  const auto found = buffer.parts.find(first);
  if (found != buffer.parts.end() && found->second.size() == n) return &found->second;
  if (found != buffer.parts.end()) drop(buffer);  // cut differently: its parts would stay for ever
  if (!make_room(n * sizeof(float), buffer)) return nullptr;
  try {
    std::vector<float>& part = buffer.parts[first] = std::vector<float>(n);
    n_bytes_ += n * sizeof(float);
    return &part;
  } catch (const std::bad_alloc&) {
    buffer.parts.erase(first);
    return nullptr;
  }
}

void KeptBack::forget(Subject subject) {
  const auto found = buffers_.find(without_step(subject));
  if (found == buffers_.end()) return;
  drop(found->second);
  buffers_.erase(found);
}

void KeptBack::drop(OfBuffer& buffer) {
  for (const auto& [_, part] : buffer.parts) n_bytes_ -= part.size() * sizeof(float);
  buffer.parts.clear();
}

bool KeptBack::make_room(size_t n_bytes, const OfBuffer& but) {
  while (n_bytes_ + n_bytes > most_bytes_) {
    OfBuffer* oldest = nullptr;
    for (auto& [_, buffer] : buffers_)
      if (&buffer != &but && !buffer.parts.empty() &&
          (oldest == nullptr || buffer.last_use < oldest->last_use))
        oldest = &buffer;
    if (oldest == nullptr) return false;
    drop(*oldest);
  }
  return true;
}

}  // namespace shoal
