#include "transport/path_loads.h"

#include <algorithm>
#include <cmath>

namespace shoal {
namespace {

// The weight of the newest measurement: token buckets pass bursts faster than the line.
constexpr double kNewest = 0.25;

}  // namespace

void PathLoads::look(int64_t now) {
  if (now - looked_ns_ < kLookNs) return;
  // After such a gap the time of the confirmations is unknown.
  const bool is_late = now - looked_ns_ >= kUnseenNs;
  looked_ns_ = now;
  if (is_late)
    for (Load& load : loads_) load.is_flowing = false;
  for (PathShare* share : shares_) share->look(now);
}

void PathLoads::add(size_t path, size_t n_bytes) { loads_[path].n_bytes += n_bytes; }

void PathLoads::confirm(size_t path, size_t n_bytes, int64_t now) {
  Load& load = loads_[path];
  if (load.is_flowing) {
    load.n_confirmed += n_bytes;
    load.busy_ns += now - load.since_ns;
  }
  load.n_bytes -= n_bytes;
  load.since_ns = now;
  load.is_flowing = load.n_bytes >= kAloneBytes;
  if (load.busy_ns < kWindowNs) return;
  const double rate = static_cast<double>(load.n_confirmed) / static_cast<double>(load.busy_ns);
  const bool is_old = now - load.measured_ns >= kOldNs;
  load.rate = is_old ? rate : load.rate + kNewest * (rate - load.rate);
  load.measured_ns = now;
  load.busy_ns = 0;
  load.n_confirmed = 0;
}

void PathLoads::drop(size_t path, size_t n_bytes) {
  loads_[path].n_bytes -= n_bytes;
  loads_[path].is_flowing = false;
}

double PathLoads::due(size_t path, size_t n_bytes, int64_t now) const {
  double fastest = 0;
  for (const Load& load : loads_) fastest = std::max(fastest, load.rate);
  const Load& load = loads_[path];
  const auto n = static_cast<double>(load.n_bytes + n_bytes);
  if (fastest == 0) return n;
  const auto n_doubled = static_cast<double>(now - load.measured_ns) / kDoubledNs;
  const double rate = load.rate > 0 ? load.rate * std::exp2(n_doubled) : fastest;
  return n / std::min(rate, fastest);
}

PathShare::PathShare(PathLoads& loads, size_t path, const Pipe& pipe)
    : loads_(loads), path_(path), pipe_(pipe) {
  loads_.shares_.push_back(this);
}

PathShare::~PathShare() {
  uncount();
  std::erase(loads_.shares_, this);
}

void PathShare::took(size_t n_bytes, int64_t now, bool is_bulk) {
  n_taken_ += n_bytes;
  if (n_counted_ == 0 && !is_bulk) return;
  if (n_counted_ == 0) moved_ns_ = now;
  n_counted_ += n_bytes;
  loads_.add(path_, n_bytes);
}

void PathShare::wrote(size_t n_bytes) { n_written_ = std::min(n_taken_, n_written_ + n_bytes); }

void PathShare::look(int64_t now) {
  if (n_counted_ == 0) return;
  const auto n_left = static_cast<uint64_t>(std::max<int64_t>(pipe_.n_unconfirmed(), 0));
  const uint64_t n_confirmed = n_written_ - std::min(n_written_, n_left);
  if (n_confirmed > n_confirmed_) {
    const auto n_counted = std::min<uint64_t>(n_counted_, n_confirmed - n_confirmed_);
    loads_.confirm(path_, n_counted, now);
    n_counted_ -= n_counted;
    n_confirmed_ = n_confirmed;
    moved_ns_ = now;
  } else if (now - moved_ns_ >= kStandsStillNs) {
    uncount();
  }
}

void PathShare::uncount() {
  if (n_counted_ > 0) loads_.drop(path_, n_counted_);
  n_counted_ = 0;
}

}  // namespace shoal
