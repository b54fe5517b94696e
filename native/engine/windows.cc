#include "engine/windows.h"

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
  call.windows.resize(call.plan->layout[kScratch].n_bytes.size());
  for (uint32_t at = 0; at < steps.size(); ++at) {
    Window& window = call.windows[steps[at].chunk];
    window.n_segments = call.state[at].n_segments;
    window.steps.push_back(at);  // the first is the one that stores
  }
  calls_.push_back(call.weak_from_this());
  grant(call);
}

void Windows::settle(Call& call) {
  if (call.windows_moved.empty()) return;
  for (const uint32_t chunk : std::exchange(call.windows_moved, {})) {
    Window& window = call.windows[chunk];
    uint32_t upto = window.end();
    for (const uint32_t at : window.steps) upto = std::min(upto, call.state[at].done);
    for (; window.first < upto; ++window.first) {
      n_bytes_ -= window.blocks.front().size();
      call.n_windows--;
      window.blocks.erase(window.blocks.begin());
    }
  }
  pass_on();
}

void Windows::give_back(Call& call) {
  for (Window& window : std::exchange(call.windows, {}))
    for (const Block& block : window.blocks) n_bytes_ -= block.size();
  call.n_windows = 0;
}

void Windows::pass_on() {
  for (const auto& waiting : calls_)
    if (const auto call = waiting.lock(); call != nullptr && !call->ended) grant(*call);
  std::erase_if(calls_, [](const auto& waiting) {
    const auto call = waiting.lock();
    return call == nullptr || call->ended || call->has_all_windows;
  });
}

void Windows::grant(Call& call) {
  while (take_next(call)) {
  }
}

// The chunk of which the least part has been taken, the first of those; null: all have been.
Window* Windows::next_of(Call& call) {
  Window* next = nullptr;
  for (Window& window : call.windows) {
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
  call.has_all_windows = window == nullptr;
  if (window == nullptr) return false;
  const uint32_t first = window->steps.front();
  const size_t n_bytes = call.segment_bytes(call.plan->program->steps[first], window->end());
  if (n_bytes_ + n_bytes > ceiling_ && call.n_windows > 0) return false;
  window->blocks.push_back(staging_.take(n_bytes));
  n_bytes_ += n_bytes;
  call.n_windows++;
  steps_.make_ready(call, first);
  return true;
}

}  // namespace shoal
