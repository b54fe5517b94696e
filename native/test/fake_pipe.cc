#include "test/fake_pipe.h"

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "test/fake_link.h"
#include "transport/tcp_link.h"

namespace shoal::test {
namespace {

constexpr size_t kRoom = 8192;  // bytes that a stream holds when full
constexpr int64_t kStepNs = kMillisecond;

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

FakePipe::FakePipe(FakeNet& net, int rank, int peer, uint32_t path,
                   std::shared_ptr<FakeStreams> streams)
    : net_(net), rank_(rank), peer_(peer), path_(path), streams_(std::move(streams)) {}

FakePipe::~FakePipe() {
  out().is_ended = true;
  in().is_unread = true;
  in().bytes.clear();
}

ssize_t FakePipe::write(const iovec* vectors, size_t n_vectors) {
  FakeRandom& random = net_.random_;
  const FakeNet::Options& options = net_.options;
  const bool may_go = options.longest_remake > 0 || net_.paths_.n_living(rank_, peer_) > 1;
  if (random.chance(options.path_cuts) && may_go) net_.paths_.cut(rank_, peer_, path_);
  if (random.chance(options.path_mutes) && may_go) net_.paths_.mute(rank_, peer_, path_);
  FakeStream& stream = out();
  if (stream.mute_at > 0) {
    stream.has_swallowed = true;
    return static_cast<ssize_t>(size_of(vectors, n_vectors));
  }
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
    if (stream.mute_at > 0) return failed(EAGAIN);
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
  if (both && !out().is_cut) net_.paths_.cut(rank_, peer_, path_);
}

// Before a stream turns mute, the bytes that it takes are confirmed at once.
Pipe::Silence FakePipe::silence() {
  if (out().mute_at == 0) return {};
  const int64_t since = static_cast<int64_t>(net_.now_ - out().mute_at) * kStepNs;
  return {out().has_swallowed ? since : 0, since, 0};
}

// ---- the net's side

struct FakePaths::End final : PathSource {
  End(FakePaths& paths_of, int of) : paths(paths_of), rank(of) {}
  int64_t resume_ns() const override { return paths.net_.options.resume_ns; }
  void attached(int peer, PathLink& link) override {
    paths.links_[paths.index(rank, peer)] = &link;
  }
  void want(int peer, size_t path) override { paths.want(rank, peer, static_cast<uint32_t>(path)); }
  void ended(int peer) override { paths.links_[paths.index(rank, peer)] = nullptr; }

  FakePaths& paths;
  const int rank;
};

FakePaths::FakePaths(FakeNet& net, int n_ranks)
    : net_(net), n_ranks_(n_ranks), links_(static_cast<size_t>(n_ranks * n_ranks), nullptr) {
  if (net.options.n_paths == 0) return;
  streams_.resize(links_.size() * Header::kMaxPaths);
  in_making_.resize(streams_.size());
  for (int rank = 0; rank < n_ranks; ++rank) ends_.push_back(std::make_unique<End>(*this, rank));
}

FakePaths::~FakePaths() = default;

std::unique_ptr<Link> FakePaths::link(int rank, int peer) {
  const FakeNet::Options& options = net_.options;
  auto link = std::make_unique<TcpLink>(peer, options.n_paths,
                                        FrameKeys(options.job_key, options.epoch, rank, peer),
                                        Outbox::Sizes{options.copied, options.max_inline});
  if (options.longest_remake > 0) link->resume_by(*ends_[static_cast<size_t>(rank)]);
  for (uint32_t path = 0; path < options.n_paths && !options.begins_unlinked; ++path)
    link->add_path(
        path, std::make_unique<FakePipe>(net_, rank, peer, path, streams(rank, peer, path)), {});
  return link;
}

std::shared_ptr<FakeStreams>& FakePaths::streams(int a, int b, uint32_t path) {
  const size_t at = index(std::min(a, b), std::max(a, b)) * Header::kMaxPaths + path;
  if (streams_[at] == nullptr) streams_[at] = std::make_shared<FakeStreams>();
  return streams_[at];
}

// Bytes in flight are lost from some offset on, acknowledgements too.
void FakePaths::cut(int a, int b, uint32_t path) {
  for (FakeStream& one_way : *streams(a, b, path)) {
    one_way.bytes.resize(net_.random_.below(one_way.bytes.size() + 1));
    one_way.is_cut = true;
  }
  n_cut_++;
}

void FakePaths::mute(int a, int b, uint32_t path) {
  for (FakeStream& one_way : *streams(a, b, path)) {
    one_way.bytes.resize(net_.random_.below(one_way.bytes.size() + 1));
    one_way.mute_at = std::max<uint64_t>(1, net_.now_);
  }
  n_cut_++;
}

size_t FakePaths::n_living(int a, int b) const {
  size_t n = 0;
  for (uint32_t path = 0; path < net_.options.n_paths; ++path) {
    const auto& both = streams_[index(std::min(a, b), std::max(a, b)) * Header::kMaxPaths + path];
    n += both == nullptr || !((*both)[0].is_cut || (*both)[0].mute_at > 0);
  }
  return n;
}

bool FakePaths::is_idle() const {
  return arrivals_.empty() && std::all_of(streams_.begin(), streams_.end(), [](const auto& both) {
           return both == nullptr || ((*both)[0].bytes.empty() && (*both)[1].bytes.empty());
         });
}

// Each end reports it, and receives the new path, at different times.
void FakePaths::want(int rank, int peer, uint32_t path) {
  const size_t at = index(std::min(rank, peer), std::max(rank, peer)) * Header::kMaxPaths + path;
  if (in_making_[at]) return;
  in_making_[at] = true;
  const uint64_t due = net_.now_ + 1 + net_.random_.below(net_.options.longest_remake);
  arrivals_.push_back({due, rank, peer, path, nullptr, true});
}

void FakePaths::step() {
  for (size_t left = arrivals_.size(); left > 0; --left) {
    Arrival arrival = std::move(arrivals_.front());
    arrivals_.pop_front();
    if (arrival.due > net_.now_)
      arrivals_.push_back(std::move(arrival));
    else
      arrive(std::move(arrival));
  }
}

void FakePaths::arrive(Arrival arrival) {
  const auto& [due, rank, peer, path, made, is_first] = arrival;
  const size_t at = index(std::min(rank, peer), std::max(rank, peer)) * Header::kMaxPaths + path;
  PathLink* link = links_[index(rank, peer)];
  if (is_first && links_[index(peer, rank)] == nullptr) {  // its process is gone
    in_making_[at] = false;
    if (link != nullptr) link->give_up("nobody listens there any more");
    return;
  }
  if (is_first) {
    arrival.streams = streams_[at] = std::make_shared<FakeStreams>();
    arrivals_.push_back({due + net_.random_.below(net_.options.longest_remake), peer, rank, path,
                         arrival.streams, false});
    n_reconnects_++;
  } else {
    in_making_[at] = false;
  }
  auto pipe = std::make_unique<FakePipe>(net_, rank, peer, path, arrival.streams);
  if (link == nullptr) return;
  link->add_path(path, std::move(pipe), {});
  link->dial();  // the other paths of a link that the peer began
}

}  // namespace shoal::test
