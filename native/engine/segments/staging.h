// Memory for segments that arrive before they can be used, under one ceiling per mesh.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace shoal {

class Staging;

// One borrowed piece of staging memory, returned on destruction.
class Block {
 public:
  Block() = default;
  Block(Staging* home, std::unique_ptr<std::byte[]> data, size_t size)
      : home_(home), data_(std::move(data)), size_(size) {}
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Block();

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void swap(Block& other) {
    std::swap(home_, other.home_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  Staging* home_ = nullptr;
  std::unique_ptr<std::byte[]> data_;
  size_t size_ = 0;
};

// Threads: under the channel's lock. Must outlive its blocks.
class Staging {
 public:
  explicit Staging(size_t ceiling) : ceiling_(ceiling) {
    kept_.reserve(most_kept_);  // blocks come back in destructors, where nothing may throw
  }

  // Reserve `n_bytes` for a peer before it sends them. False if that would exceed the ceiling.
  bool reserve(size_t n_bytes) {
    if (reserved_ + n_bytes > ceiling_) return false;
    reserved_ += n_bytes;
    return true;
  }
  void unreserve(size_t n_bytes) { reserved_ -= n_bytes; }

  Block take(size_t n_bytes);
  // Keep freed blocks of up to `n_bytes` in total for the next segments, beyond kLeastKept blocks.
  void keep(size_t n_bytes);
  size_t reserved() const { return reserved_; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }

 private:
  friend class Block;
  void give_back(std::unique_ptr<std::byte[]> data, size_t size);

  // Blocks of this size are kept for the next segment; a fresh one costs page faults.
  static constexpr size_t kKept = 128u << 10;
  static constexpr size_t kLeastKept = 32;
  size_t most_kept_ = kLeastKept;

  size_t ceiling_;
  size_t reserved_ = 0, used_ = 0, peak_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> kept_;
};

// Room under the ceiling, returned on destruction. False: there was none.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Staging& home, size_t n_bytes)
      : home_(home.reserve(n_bytes) ? &home : nullptr), n_bytes_(n_bytes) {}
  Reservation(Reservation&& other) noexcept { swap(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Reservation() {
    if (home_ != nullptr) home_->unreserve(n_bytes_);
  }

  explicit operator bool() const { return home_ != nullptr; }

 private:
  void swap(Reservation& other) {
    std::swap(home_, other.home_);
    std::swap(n_bytes_, other.n_bytes_);
  }
  Staging* home_ = nullptr;
  size_t n_bytes_ = 0;
};

}  // namespace shoal
