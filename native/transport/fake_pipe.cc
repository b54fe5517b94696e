#include "transport/fake_pipe.h"

#include <algorithm>
#include <cerrno>

#include "transport/fake_link.h"

namespace shoal {
namespace {

constexpr size_t kRoom = 8192;  // bytes that a stream holds before it is full

size_t size_of(const iovec* vectors, size_t n_vectors) {
  size_t n_bytes = 0;
  for (size_t at = 0; at < n_vectors; ++at) n_bytes += vectors[at].iov_len;
  return n_bytes;
}

ssize_t failed(int why) {
  errno = why;
  return -1;
}

}  // namespace

FakePipe::FakePipe(FakeNet& net, int rank, int peer, uint32_t path)
    : net_(net), rank_(rank), peer_(peer), path_(path) {}

FakePipe::~FakePipe() {
  out().is_ended = true;
  in().is_unread = true;
  in().bytes.clear();
}

FakeStream& FakePipe::out() { return net_.stream(rank_, peer_, path_); }
FakeStream& FakePipe::in() { return net_.stream(peer_, rank_, path_); }

ssize_t FakePipe::write(const iovec* vectors, size_t n_vectors) {
  FakeRandom& random = net_.random_;
  const FakeNet::Options& options = net_.options;
  if (random.chance(options.path_cuts) && net_.n_living_paths(rank_, peer_) > 1)
    net_.cut_path(rank_, peer_, path_);
  FakeStream& stream = out();
  if (stream.is_cut || stream.is_unread) return failed(random.chance(0.5) ? EPIPE : ECONNRESET);
  const size_t room = kRoom - std::min(kRoom, stream.bytes.size());
  size_t left = std::min(size_of(vectors, n_vectors), room);
  if (left == 0 || random.chance(options.delays)) return failed(EAGAIN);
  if (random.chance(options.splits)) left = 1 + random.below(left);
  const size_t n_bytes = left;
  for (size_t at = 0; left > 0; ++at) {
    const size_t n = std::min(left, vectors[at].iov_len);
    const auto* from = static_cast<const std::byte*>(vectors[at].iov_base);
    stream.bytes.insert(stream.bytes.end(), from, from + n);
    left -= n;
  }
  if (random.chance(options.corrupts)) {
    const uint64_t bit = random.below(n_bytes * 8);
    stream.bytes[stream.bytes.size() - 1 - bit / 8] ^= std::byte{1} << (bit % 8);
    net_.n_corrupted_++;
  }
  return static_cast<ssize_t>(n_bytes);
}

ssize_t FakePipe::read(const iovec* vectors, size_t n_vectors) {
  FakeRandom& random = net_.random_;
  FakeStream& stream = in();
  if (stream.bytes.empty()) {
    if (stream.is_cut) return failed(ECONNRESET);
    return stream.is_ended ? 0 : failed(EAGAIN);
  }
  if (random.chance(net_.options.delays)) return failed(EAGAIN);
  size_t left = std::min(size_of(vectors, n_vectors), stream.bytes.size());
  if (random.chance(net_.options.splits)) left = 1 + random.below(left);
  const size_t n_bytes = left;
  for (size_t at = 0; left > 0; ++at) {
    const size_t n = std::min(left, vectors[at].iov_len);
    const auto end = stream.bytes.begin() + static_cast<std::ptrdiff_t>(n);
    std::copy(stream.bytes.begin(), end, static_cast<std::byte*>(vectors[at].iov_base));
    stream.bytes.erase(stream.bytes.begin(), end);
    left -= n;
  }
  return static_cast<ssize_t>(n_bytes);
}

void FakePipe::end(bool both) {
  out().is_ended = true;
  if (both) net_.cut_path(rank_, peer_, path_);
}

// ---- the net's side

FakeStream& FakeNet::stream(int from, int to, uint32_t path) {
  return streams_[static_cast<size_t>(from * n_ranks_ + to) * Header::kMaxPaths + path];
}

// What is on the way is lost from some byte on, acknowledgements too.
void FakeNet::cut_path(int a, int b, uint32_t path) {
  for (FakeStream* one_way : {&stream(a, b, path), &stream(b, a, path)}) {
    one_way->bytes.resize(random_.below(one_way->bytes.size() + 1));
    one_way->is_cut = true;
  }
  n_paths_cut_++;
}

size_t FakeNet::n_living_paths(int a, int b) {
  size_t n = 0;
  for (uint32_t path = 0; path < options.n_paths; ++path) n += !stream(a, b, path).is_cut;
  return n;
}

}  // namespace shoal
