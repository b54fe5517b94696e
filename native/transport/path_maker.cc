#include "transport/path_maker.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/socket_pipe.h"

namespace shoal {
namespace {

// Added to the path number in a HELLO: a request to dial that path, rather than the path itself.
constexpr uint32_t kAsks = PathMaker::kMostConnections;
// The delay before the lower rank asks. By then the higher rank has usually dialled, because it
// sees the loss or makes the same call. Asking at once would make two connections of each. A rank
// that waits for a call that the peer has not made loses nothing by the delay.
constexpr int64_t kBeforeAskingNs = 50 * kMillisecond;
constexpr int64_t kWithoutMemoryNs =
    20 * kMillisecond;  // before work that ran out of it is retried

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
            std::string("no descriptors to make connections: ") + std::strerror(errno) +
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
  const size_t n_channels = std::clamp(options.n_channels, size_t{1}, kMostChannels);
  for (size_t channel = 0; channel < n_channels; ++channel) sources_.emplace_back(*this, channel);
  news_.resize(n_channels);
  wake_ns_.fill(Acceptor::kNever);
  for (Peer& peer : options.peers)
    peers_[peer.rank] = {std::move(peer), std::vector<Known::Held>(n_channels), {}};
  acceptor_ = std::make_unique<Acceptor>(
      epoll_fd_, kAcceptorTags, std::move(options.listeners),
      [this](const Hello& hello) { return judge(hello); },
      [this](Authenticated who) { proven(std::move(who), false); }, Acceptor::Options{});
  connector_ = std::make_unique<Connector>(
      epoll_fd_, kConnectorTags,
      [this](const Connector::Wish& wish) {
        return pair_key(job_key_.bytes(), epoch_, wish.hello.rank, wish.hello.to_rank, "path");
      },
      Connector::Outcome{[this](Authenticated who) { proven(std::move(who), true); },
                         [this](const Hello& hello, const std::string& why) { gone(hello, why); },
                         nullptr},
      Connector::Pace{});
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
  close_news();
}

void PathMaker::close_news() {
  for (std::vector<News>& news : news_) {
    for (const News& one : news)
      if (one.fd >= 0) ::close(one.fd);
    news.clear();
  }
}

// The descriptors of pipes are closed by SocketPipe, whose lock is held here.
void PathMaker::forsake() {
  acceptor_->close();
  connector_->close();
  for (std::vector<News>& news : news_)
    for (News& one : news)
      if (one.fd >= 0) ::close(std::exchange(one.fd, -1));
  for (int* fd : {&epoll_fd_, &timer_fd_}) ::close(std::exchange(*fd, -1));
}

// ---- events

void PathMaker::step() {
  std::lock_guard lock(forking());
  const int64_t now = now_ns();
  try {
    take_events(now);
    step_ns_ = std::min(acceptor_->expire(now), connector_->step(now));
  } catch (const std::bad_alloc&) {  // events that were not handled are reported again
    step_ns_ = now + kWithoutMemoryNs;
  }
  for (size_t channel = 0; channel < n_channels(); ++channel) {
    if (wake_ns_[channel] > now) continue;
    wake_ns_[channel] = Acceptor::kNever;
    called_[channel] = true;
  }
  arm();
}

void PathMaker::take_events(int64_t now) {
  epoll_event events[32];
  int n = 0;
  do {  // until nothing is left, since only new events wake the progress thread
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
}

void PathMaker::wake_at(size_t channel, int64_t when) {
  std::lock_guard lock(forking());
  wake_ns_[channel] = std::min(wake_ns_[channel], when);
  arm();
}

void PathMaker::arm() {
  const int64_t at = std::min(*std::min_element(wake_ns_.begin(), wake_ns_.end()), step_ns_);
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
  const size_t connection = hello.path % kAsks;
  const size_t channel = connection / known->second.peer.n_paths;
  if (hello.path >= 2 * kAsks || channel >= n_channels() || asks != (from < rank_))
    return Progress::kRefused;
  const Known::Held& held = known->second.links[channel];
  if (held.has_ended) return Progress::kStale;          // lets a peer that was given up know
  if (held.link == nullptr) return Progress::kRefused;  // too early: the peer dials again
  return pair_key(job_key_.bytes(), epoch_, hello.rank, hello.to_rank, "path");
}

// Called under the lock. The caller of step() wakes the channel's progress thread.
void PathMaker::notify(const Known& known, News news) {
  const size_t channel = news.connection / known.peer.n_paths;
  news_[channel].push_back(std::move(news));
  called_[channel] = true;
}

void PathMaker::gone(const Hello& hello, const std::string& why) {
  const auto peer = static_cast<int>(hello.to_rank);
  notify(peers_.at(peer),
         {News::Kind::kGone, peer, hello.path % kAsks, -1, nullptr, false, {}, why});
}

void PathMaker::proven(Authenticated who, bool dialled) {
  const bool asks = who.hello.path >= kAsks;
  const int peer = static_cast<int>(dialled ? who.hello.to_rank : who.hello.rank);
  const uint32_t connection = who.hello.path % kAsks;
  Known& known = peers_.at(peer);
  if (!asks) {
    if (dialled) known.from[connection] = Address::local_of(who.fd);
    return notify(known, {News::Kind::kMade, peer, connection, who.fd, nullptr, false,
                          std::move(who.session), ""});
  }
  notify(known, {News::Kind::kAsked, peer, connection, -1, nullptr, false, {}, ""});
  connector_->hasten(who.hello.rank, connection, now_ns());
  ::close(who.fd);
}

std::vector<int> PathMaker::notify_links(size_t channel, FrameSink& sink, const Watch& watch) {
  std::vector<int> peers;
  try {
    while (pass_news(channel, sink, watch, peers)) {
    }
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(forking());
    called_[channel] = false;
    wake_ns_[channel] = std::min(wake_ns_[channel], now_ns() + kWithoutMemoryNs);
    arm();
  }
  return peers;
}

// Handle the oldest news; false if there is none. It is kept until it is handled in full, and each
// part may be repeated, because memory may run out at any of them.
bool PathMaker::pass_news(size_t channel, FrameSink& sink, const Watch& watch,
                          std::vector<int>& peers) {
  std::unique_lock lock(forking());
  called_[channel] = !news_[channel].empty();
  if (!called_[channel]) return false;
  News& news = news_[channel].front();
  const int peer = news.peer;
  const News::Kind kind = news.kind;
  const Known& known = peers_.at(peer);
  PathLink* const link = known.links[channel].link;
  const size_t path = news.connection % known.peer.n_paths;
  peers.push_back(peer);
  if (kind == News::Kind::kMade) hand_over(news, link, path, watch);
  if (kind == News::Kind::kGone && link != nullptr) link->give_up(news.why);
  const bool is_unwatched = kind == News::Kind::kMade && !news.is_watched;
  lock.unlock();
  if (link != nullptr) {
    if (is_unwatched && peer < rank_) want(channel, peer, path);  // dials it once more
    if (kind == News::Kind::kMade) link->dial();  // the others of a link that the peer began
    if (kind == News::Kind::kAsked) link->doubt(sink, path);
  }
  lock.lock();
  news_[channel].erase(news_[channel].begin());
  return true;
}

// Must hold the lock: a forked child that does not know of the descriptor would keep the connection
// open.
void PathMaker::hand_over(News& news, PathLink* link, size_t path, const Watch& watch) {
  if (news.fd >= 0) {
    news.pipe = std::make_unique<SocketPipe>(news.fd);
    news.fd = -1;
  }
  if (news.pipe != nullptr && link != nullptr) {
    if (!news.is_watched) news.is_watched = watch(news.pipe->fd(), news.peer);
    if (news.is_watched) {
      link->add_path(path, std::move(news.pipe), news.session.bytes());
      // Forget the wish only now: a link that does not have the path yet asks for it again.
      connector_->forget(static_cast<uint32_t>(news.peer),
                         kAsks + static_cast<uint32_t>(news.connection));
    }
  }
  news.pipe.reset();
}

// ---- requests

void PathMaker::attached(size_t channel, int peer, PathLink& link) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known != peers_.end()) known->second.links[channel].link = &link;
}

void PathMaker::want(size_t channel, int peer, size_t path) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known == peers_.end() || known->second.links[channel].link == nullptr) return;
  const Peer& who = known->second.peer;
  if (who.listens_at.empty()) return;
  const bool dials = peer < rank_;
  const size_t connection = channel * who.n_paths + path;
  Connector::Wish wish;
  wish.hello = {epoch_, static_cast<uint32_t>(rank_), static_cast<uint32_t>(peer),
                static_cast<uint32_t>(dials ? connection : kAsks + connection)};
  wish.to = who.listens_at[path % who.listens_at.size()];
  const auto from = known->second.from.find(static_cast<uint32_t>(connection));
  if (dials && from != known->second.from.end()) wish.from = from->second;
  wish.is_kept = !dials;
  wish.pause_ns = dials ? 0 : kBeforeAskingNs;
  const int64_t now = now_ns();
  step_ns_ = std::min(step_ns_, now + wish.pause_ns);
  connector_->want(std::move(wish), now);
  arm();
}

// If this rank has no descriptor left the text names it, because other ranks read the text too.
std::string PathMaker::last_failure(int peer) const {
  std::lock_guard lock(forking());
  const int error = connector_->last_error(static_cast<uint32_t>(peer));
  const uint64_t n_turned_away = acceptor_->n_turned_away();
  const bool lacks = error == EMFILE || error == ENFILE;
  std::string text = error == 0 ? "" : std::strerror(error);
  if (lacks) text += ": rank " + std::to_string(rank_) + " has no file descriptor left (ulimit -n)";
  if (n_turned_away > 0)
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank_) + " refused " +
            std::to_string(n_turned_away) +
            " connections for want of a file descriptor (ulimit -n)";
  return text;
}

void PathMaker::ended(size_t channel, int peer) {
  std::lock_guard lock(forking());
  const auto known = peers_.find(peer);
  if (known == peers_.end()) return;
  known->second.links[channel] = {nullptr, true};
  const size_t n_paths = known->second.peer.n_paths;
  for (size_t at = channel * n_paths; at < (channel + 1) * n_paths; ++at)
    for (const size_t connection : {at, kAsks + at})
      connector_->forget(static_cast<uint32_t>(peer), static_cast<uint32_t>(connection));
}

}  // namespace shoal
