#include "transport/endpoint.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

namespace shoal {
namespace {

constexpr uint64_t kAcceptorTags = 0;
constexpr uint64_t kConnectorTags = uint64_t{1} << 32;
constexpr uint64_t kPeerTags = uint64_t{1} << 48;
constexpr int kEvents = 64;  // at a time
// All ranks of a large job connect at once; other events have their turn between two bursts.
constexpr int kBurst = 64;

std::mutex& forking() {
  static std::mutex* const mutex = new std::mutex;  // endpoints may outlive static destructors
  return *mutex;
}

std::set<Endpoint*>& all() {
  static auto* const endpoints = new std::set<Endpoint*>;
  return *endpoints;
}

}  // namespace

void Endpoint::watch_forks() {
  static const int done = pthread_atfork([] { forking().lock(); }, [] { forking().unlock(); },
                                         [] {
                                           for (Endpoint* one : all()) one->forsake();
                                           all().clear();
                                           forking().unlock();
                                         });
  static_cast<void>(done);
}

Endpoint::Endpoint(Owner& owner, Options options)
    : owner_(owner),
      most_queued_(options.most_queued),
      patience_ns_(options.patience_ns),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      acceptor_(
          epoll_fd_, kAcceptorTags, {}, [this](const Hello& hello) { return owner_.judge(hello); },
          [this](Authenticated who) { happened_.emplace_back(Proven{std::move(who), false}); },
          {.pending_ns = options.pending_ns,
           .burst = kBurst,
           .burst_ns = 1,
           .beginnings = std::move(options.beginnings),
           .on_stranger = [this](int fd) { happened_.emplace_back(fd); },
           .on_key_differs = [this](const Hello& hello) { happened_.emplace_back(hello); },
           .on_turned_away =
               [this](const Address& caller) {
                 happened_.emplace_back(TurnedAway{acceptor_.n_turned_away(), caller.text()});
               }}),
      connector_(
          epoll_fd_, kConnectorTags,
          [this](const Connector::Wish& wish) { return Secret(keys_.at(wish.number).bytes()); },
          {[this](Authenticated who) { happened_.emplace_back(Proven{std::move(who), true}); },
           [](const Hello&, const std::string&) {},
           [this](const Connector::Failure& failure) { happened_.emplace_back(failure); }},
          {options.dial_ns, kMillisecond, 200 * kMillisecond}) {
  if (epoll_fd_ < 0)
    throw std::system_error(errno, std::generic_category(), "no descriptor for an endpoint");
  watch_forks();
  std::lock_guard lock(forking());
  all().insert(this);
}

Endpoint::~Endpoint() { close(); }

void Endpoint::close() {
  {
    std::lock_guard lock(forking());
    all().erase(this);
  }
  forsake();
}

// Without a goodbye: the parent still uses these sockets.
void Endpoint::forsake() {
  if (epoll_fd_ >= 0) ::close(std::exchange(epoll_fd_, -1));
  acceptor_.close();
  connector_.close();
  for (const auto& [tag, peer] : peers_) peer->close();
  peers_.clear();
  keys_.clear();
  close_happened();
}

void Endpoint::close_happened() {
  for (const Happened& one : happened_) {
    if (const auto* proven = std::get_if<Proven>(&one)) ::close(proven->who.fd);
    if (const auto* stranger = std::get_if<int>(&one)) ::close(*stranger);
  }
  happened_.clear();
}

uint64_t Endpoint::connect(const Address& to, const Hello& hello, Secret key) {
  Connector::Wish wish;
  wish.hello = hello;
  wish.to = to;
  wish.number = ++n_dials_;
  keys_[wish.number] = std::move(key);
  connector_.want(std::move(wish), 0);  // due at once
  due_ns_ = 0;
  return n_dials_;
}

void Endpoint::listen(int fd) {
  acceptor_.open(fd);
  due_ns_ = 0;  // it may have to wait for the kernel to have room
}

void Endpoint::hang_up(uint64_t dial) {
  connector_.forget(dial);
  keys_.erase(dial);
}

int64_t Endpoint::deadline() const {
  if (!happened_.empty()) return 0;
  int64_t next = due_ns_;
  for (const auto& [tag, peer] : peers_) next = std::min(next, peer->deadline());
  return next;
}

void Endpoint::step(int64_t now) {
  if (epoll_fd_ < 0) return;
  due_ns_ = 0;  // if a callback throws
  notify_owner();
  epoll_event events[kEvents];
  const int n = epoll_wait(epoll_fd_, events, kEvents, 0);
  for (int at = 0; at < n; ++at) {
    handle(events[at].data.u64, (events[at].events & (EPOLLHUP | EPOLLERR)) != 0, now);
    notify_owner();
  }
  std::erase_if(peers_, [](const auto& entry) { return entry.second->fd() < 0; });
  std::vector<uint64_t> due;
  for (const auto& [tag, peer] : peers_)
    if (now >= peer->deadline()) due.push_back(tag);
  for (const uint64_t tag : due) step_peer(tag, false, now);
  if (epoll_fd_ < 0) return;
  due_ns_ = std::min(acceptor_.expire(now), connector_.step(now));
  notify_owner();  // last, because the owner may call connect()
}

void Endpoint::handle(uint64_t tag, bool has_ended, int64_t now) {
  if (epoll_fd_ < 0) return;  // a callback has closed it
  if (tag >= kPeerTags)
    step_peer(tag, has_ended, now);
  else if (tag >= kConnectorTags)
    connector_.on_event(tag, now);
  else
    acceptor_.on_event(tag, now);
}

void Endpoint::step_peer(uint64_t tag, bool has_ended, int64_t now) {
  const auto found = peers_.find(tag);
  if (found == peers_.end()) return;
  const PeerPtr peer = found->second;
  std::optional<Frame> frame = peer->step(now, has_ended);
  if (peer->fd() < 0) {
    peers_.erase(tag);
  } else if (peer->is_lost()) {
    peers_.erase(found);
    peer->close();
    owner_.lost(peer, peer->error(), peer->why());
  } else if (frame) {
    owner_.received(peer, std::move(*frame));
  }
}

// Not from within the acceptor and the connector, because the owner may change both.
void Endpoint::notify_owner() {
  while (!happened_.empty()) {
    Happened one = std::move(happened_.front());
    happened_.pop_front();
    if (auto* proven = std::get_if<Proven>(&one)) {
      const uint64_t dial = proven->who.number;
      const Hello hello = proven->who.hello;
      if (proven->is_caller && keys_.erase(dial) == 0) {  // it was hung up meanwhile
        ::close(proven->who.fd);
        continue;
      }
      const PeerPtr peer = add_peer(std::move(proven->who), proven->is_caller);
      if (proven->is_caller)
        owner_.reached(peer, dial);
      else
        owner_.welcome(peer, hello);
    } else if (const auto* hello = std::get_if<Hello>(&one)) {
      owner_.key_differs(*hello);
    } else if (const auto* stranger = std::get_if<int>(&one)) {
      owner_.take_stranger(*stranger);
    } else if (const auto* away = std::get_if<TurnedAway>(&one)) {
      owner_.turned_away(away->n_so_far, away->caller);
    } else if (const auto* failure = std::get_if<Connector::Failure>(&one)) {
      if (keys_.contains(failure->number)) owner_.not_reached(*failure);
    }
  }
}

Endpoint::PeerPtr Endpoint::add_peer(Authenticated who, bool is_caller) {
  const uint64_t tag = kPeerTags + n_peers_++;
  PeerPtr& peer = peers_[tag];
  try {
    peer = std::make_shared<Peer>(epoll_fd_, tag, who.fd, who.session, is_caller, most_queued_,
                                  patience_ns_);
  } catch (...) {
    ::close(who.fd);
    peers_.erase(tag);
    throw;
  }
  return peer;
}

}  // namespace shoal
