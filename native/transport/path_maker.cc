#include "transport/path_maker.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/frame.h"
#include "transport/socket_pipe.h"

namespace shoal {
namespace {

// What `path` of a HELLO means, from here on: not this path, but please make it.
constexpr uint32_t kAsks = Header::kMaxPaths;
// The higher rank mostly has dialled by then.
constexpr int64_t kBeforeAskingNs = 50 * kMillisecond;

constexpr uint64_t kTimerTag = 0;
constexpr uint64_t kAcceptorTags = 1;
constexpr uint64_t kConnectorTags = uint64_t{1} << 32;

}  // namespace

std::mutex& PathMaker::forking() {
  static std::mutex* const mutex = new std::mutex;  // meshes may outlive static destructors
  return *mutex;
}

Error PathMaker::create(Options options, std::unique_ptr<PathMaker>& out) {
  std::unique_ptr<PathMaker> maker(new PathMaker(std::move(options)));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kTimerTag;
  if (maker->epoll_fd_ < 0 || maker->timer_fd_ < 0 ||
      epoll_ctl(maker->epoll_fd_, EPOLL_CTL_ADD, maker->timer_fd_, &event) != 0)
    return {Fault::kResource, -1,
            std::string("no descriptors to make lost connections anew: ") + std::strerror(errno) +
                "; raise the limit of open files (ulimit -n)"};
  out = std::move(maker);
  return {};
}

PathMaker::PathMaker(Options options)
    : epoch_(options.epoch),
      rank_(options.rank),
      job_key_(Bytes(options.job_key)),
      resume_ns_(options.resume_ns),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      timer_fd_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  for (Peer& peer : options.peers) peers_[peer.rank] = {std::move(peer), nullptr};
  acceptor_ = std::make_unique<Acceptor>(
      epoll_fd_, kAcceptorTags, std::move(options.listeners),
      [this](const Hello& hello) { return judge(hello); },
      [this](Proven who) { proven(std::move(who), false); });
  connector_ = std::make_unique<Connector>(
      epoll_fd_, kConnectorTags,
      [this](const Hello& hello) {
        return pair_key(job_key_.bytes(), epoch_, hello.rank, hello.to_rank, "path");
      },
      Connector::Outcome{[this](Proven who) { proven(std::move(who), true); },
                         [this](const Hello& hello, const std::string& why) {
                           news_.push_back({News::Kind::kGone,
                                            static_cast<int>(hello.to_rank),
                                            hello.path % kAsks,
                                            -1,
                                            {},
                                            why});
                         }});
}

PathMaker::~PathMaker() {
  close();
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
  if (timer_fd_ >= 0) ::close(timer_fd_);
}

void PathMaker::close() {
  std::lock_guard lock(forking());
  acceptor_->close();
  connector_->close();
  for (const News& one : news_)
    if (one.fd >= 0) ::close(one.fd);
  news_.clear();
}

void PathMaker::forsake() {
  acceptor_->close();
  connector_->close();
  for (const News& one : news_)
    if (one.fd >= 0) ::close(one.fd);
  news_.clear();
  for (int* fd : {&epoll_fd_, &timer_fd_}) ::close(std::exchange(*fd, -1));
}

// ---- what comes

void PathMaker::step() {
  std::lock_guard lock(forking());
  const int64_t now = now_ns();
  epoll_event events[32];
  int n = 0;
  do {  // until there is nothing: the lane is told of what comes anew
    n = epoll_wait(epoll_fd_, events, 32, 0);
    for (int at = 0; at < n; ++at) {
      const uint64_t tag = events[at].data.u64;
      uint64_t n_expired = 0;
      if (tag == kTimerTag) [[maybe_unused]]
        const ssize_t read = ::read(timer_fd_, &n_expired, sizeof(n_expired));
      else if (tag >= kConnectorTags)
        connector_->on_event(tag, now);
      else
        acceptor_->on_event(tag, now);
    }
  } while (n > 0);
  if (wake_ns_ <= now) wake_ns_ = Acceptor::kNever;
  step_ns_ = std::min(acceptor_->expire(now), connector_->step(now));
  arm();
}

void PathMaker::wake_at(int64_t when) {
  std::lock_guard lock(forking());
  wake_ns_ = std::min(wake_ns_, when);
  arm();
}

void PathMaker::arm() {
  const int64_t at = std::min(wake_ns_, step_ns_);
  itimerspec when{};  // all zero: never
  if (at != Acceptor::kNever) {
    when.it_value.tv_sec = at / kSecond;
    when.it_value.tv_nsec = std::max<int64_t>(at % kSecond, 1);
  }
  timerfd_settime(timer_fd_, TFD_TIMER_ABSTIME, &when, nullptr);
}

std::variant<Secret, Progress> PathMaker::judge(const Hello& hello) const {
  if (hello.epoch != epoch_) return Progress::kStale;
  const int from = static_cast<int>(hello.rank);
  const auto known = peers_.find(from);
  if (hello.to_rank != static_cast<uint32_t>(rank_) || known == peers_.end())
    return Progress::kRefused;
  const bool asks = hello.path >= kAsks;
  const size_t path = hello.path % kAsks;
  if (hello.path >= 2 * kAsks || path >= known->second.peer.n_paths || asks != (from < rank_))
    return Progress::kRefused;
  if (known->second.link == nullptr) return Progress::kStale;  // who was given up learns so
  return pair_key(job_key_.bytes(), epoch_, hello.rank, hello.to_rank, "path");
}

void PathMaker::proven(Proven who, bool dialled) {
  const bool asks = who.hello.path >= kAsks;
  const int peer = static_cast<int>(dialled ? who.hello.to_rank : who.hello.rank);
  const size_t path = who.hello.path % kAsks;
  if (!asks) {
    news_.push_back({News::Kind::kMade, peer, path, who.fd, std::move(who.session), ""});
    if (!dialled) connector_->forget(who.hello.rank, kAsks + who.hello.path);
    return;
  }
  news_.push_back({News::Kind::kAsked, peer, path, -1, {}, ""});
  connector_->hasten(who.hello.rank, static_cast<uint32_t>(path), now_ns());
  ::close(who.fd);
}

std::vector<int> PathMaker::tell_links(FrameSink& sink, const Watch& watch) {
  std::vector<int> peers;
  for (;;) {
    std::unique_lock lock(forking());
    if (news_.empty()) return peers;
    News news = std::move(news_.front());
    news_.erase(news_.begin());
    PathLink* link = peers_[news.peer].link;
    bool is_watched = true;
    if (news.kind == News::Kind::kMade) {
      // NOT without the lock before the descriptor is the link's: a child of a fork that does not
      // know of it would keep the connection open.
      auto pipe = std::make_unique<SocketPipe>(news.fd);
      is_watched = link != nullptr && watch(news.fd, news.peer);
      if (is_watched) link->add_path(news.path, std::move(pipe), news.session.bytes());
    }
    lock.unlock();
    if (link == nullptr) continue;
    if (!is_watched && news.peer < rank_) lost(news.peer, news.path);  // dials it once more
    if (news.kind == News::Kind::kGone) link->give_up(news.why);
    if (news.kind == News::Kind::kAsked) link->doubt(sink, news.path);
    peers.push_back(news.peer);
  }
}

// ---- what is wanted

void PathMaker::attached(int peer, PathLink& link) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known != peers_.end()) known->second.link = &link;
}

void PathMaker::lost(int peer, size_t path) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known == peers_.end() || known->second.link == nullptr) return;
  const Peer& who = known->second.peer;
  const bool dials = peer < rank_;
  Connector::Wish wish;
  wish.hello = {epoch_, static_cast<uint32_t>(rank_), static_cast<uint32_t>(peer),
                static_cast<uint32_t>(dials ? path : kAsks + path)};
  const size_t at = dials ? path : 0;
  if (at >= who.listens_at.size()) return;
  wish.to = who.listens_at[at];
  if (dials && path < who.from.size()) wish.from = who.from[path];
  wish.is_kept = !dials;
  wish.pause_ns = dials ? 0 : kBeforeAskingNs;
  const int64_t now = now_ns();
  step_ns_ = std::min(step_ns_, now + wish.pause_ns);
  connector_->want(std::move(wish), now);
  arm();
}

void PathMaker::ended(int peer) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known == peers_.end()) return;
  known->second.link = nullptr;
  connector_->forget(static_cast<uint32_t>(peer));
}

}  // namespace shoal
