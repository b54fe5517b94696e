#include "engine/segments/windows.h"

#include <algorithm>
#include <utility>

namespace shoal {

void Windows::open(size_t staging_bytes) {
  if (std::exchange(is_open_, true)) return;
  for (ceiling_ = staging_bytes / 2; ceiling_ > 0 && !staging_.reserve(ceiling_);) ceiling_ /= 2;
  staging_.keep(ceiling_);
}

void Windows::begin(Call& call) {
  const auto& steps = call.plan->program->steps;
  call.windows.of_chunk.resize(call.plan->layout[kScratch].n_bytes.size());
  for (uint32_t at = 0; at < steps.size(); ++at) {
    Window& window = call.windows.of_chunk[steps[at].chunk];
    window.n_segments = call.state[at].n_segments;
    window.steps.push_back(at);  // the first is the one that stores
    if (steps[at].kind == StepKind::kRecv) window.n_receives++;
  }
  call.windows.is_incast = is_incast(call);
  calls_.push_back(call.weak_from_this());
  grant(call);
}

// True if this rank receives at least twice as many bytes as a worker contributes.
bool Windows::is_incast(const Call& call) {
  const auto& lengths = call.plan->layout[kScratch].n_bytes;
  uint64_t n_in = 0;
  for (size_t chunk = 0; chunk < lengths.size(); ++chunk)
    n_in += lengths[chunk] * call.windows.of_chunk[chunk].n_receives;
  const uint64_t tensor_bytes = call.plan->tensor_bytes;
  return tensor_bytes > 0 && n_in / 2 >= tensor_bytes;
}

// True if bytes that were on their way have arrived.
bool Windows::take_in(Call& call) {
  const uint64_t n_bytes = std::exchange(call.windows.n_came_in, 0);
  call.windows.n_inbound -= n_bytes;
  n_inbound_ -= n_bytes;
  return n_bytes > 0;
}

void Windows::settle(Call& call) {
  const bool came = take_in(call);
  if (call.windows.moved.empty() && !came) return;
  for (const uint32_t chunk : std::exchange(call.windows.moved, {})) {
    Window& window = call.windows.of_chunk[chunk];
    uint32_t upto = window.end();
    for (const uint32_t at : window.steps) upto = std::min(upto, call.state[at].done);
    for (; window.first < upto; ++window.first) {
      n_bytes_ -= window.blocks.front().size();
      call.windows.n_held--;
      window.blocks.erase(window.blocks.begin());
    }
  }
  pass_on();
}

void Windows::give_back(Call& call) {
  for (Window& window : std::exchange(call.windows.of_chunk, {}))
    for (const Block& block : window.blocks) n_bytes_ -= block.size();
  call.windows.n_held = 0;
  n_inbound_ -= std::exchange(call.windows.n_inbound, 0);
}

void Windows::pass_on() {
  for (const auto& waiting : calls_)
    if (const auto call = waiting.lock(); call != nullptr && !call->ended) grant(*call);
  std::erase_if(calls_, [](const auto& waiting) {
    const auto call = waiting.lock();
    return call == nullptr || call->ended || call->windows.has_all;
  });
}

void Windows::grant(Call& call) {
  while (take_next(call)) {
  }
}

// The chunk with the smallest part taken, the first among equals; null if all chunks have been
// taken completely.
Window* Windows::next_of(Call& call) {
  Window* next = nullptr;
  for (Window& window : call.windows.of_chunk) {
    if (window.end() == window.n_segments) continue;
    if (next == nullptr ||
        uint64_t{window.end()} * next->n_segments < uint64_t{next->end()} * window.n_segments)
      next = &window;
  }
  return next;
}

// False if there is no room, or nothing left to take.
bool Windows::take_next(Call& call) {
  Window* window = next_of(call);
  call.windows.has_all = window == nullptr;
  if (window == nullptr) return false;
  const uint32_t first = window->steps.front();
  const size_t n_bytes = call.segment_bytes(call.plan->program->steps[first], window->end());
  if (n_bytes_ + n_bytes > ceiling_ && call.windows.n_held > 0) return false;
  const uint64_t n_in = call.windows.is_incast ? uint64_t{n_bytes} * window->n_receives : 0;
  if (n_inbound_ + n_in > most_inbound_ && call.windows.n_inbound > 0) return false;
  window->blocks.push_back(staging_.take(n_bytes));
  n_bytes_ += n_bytes;
  call.windows.n_held++;
  call.windows.n_inbound += n_in;
  n_inbound_ += n_in;
  // With incast, every receive is granted as windows are taken; otherwise only the first.
  for (size_t at = call.windows.is_incast ? window->n_receives : 1; at-- > 0;)
    steps_.make_ready(call, window->steps[at]);
  return true;
}

}  // namespace shoal
