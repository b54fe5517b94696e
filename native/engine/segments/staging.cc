#include "engine/segments/staging.h"

#include <algorithm>

namespace shoal {

Block::~Block() {
  if (data_ != nullptr) home_->give_back(std::move(data_), size_);
}

Block Staging::take(size_t n_bytes) {
  const bool keepable = n_bytes > kKept / 2 && n_bytes <= kKept;
  std::unique_ptr<std::byte[]> data;
  if (keepable && !kept_.empty()) {
    data = std::move(kept_.back());
    kept_.pop_back();
  } else {
    data.reset(new std::byte[keepable ? kKept : n_bytes]);
  }
  used_ += n_bytes;  // NOT before it is there
  peak_ = std::max(peak_, used_);
  return {this, std::move(data), n_bytes};
}

void Staging::keep(size_t n_bytes) {
  const size_t most = kLeastKept + n_bytes / kKept;
  kept_.reserve(most);
  most_kept_ = most;
}

void Staging::give_back(std::unique_ptr<std::byte[]> data, size_t size) {
  used_ -= size;
  if (size > kKept / 2 && size <= kKept && kept_.size() < most_kept_)
    kept_.push_back(std::move(data));
}

}  // namespace shoal
