#include "engine/shell/progress_thread.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/clock.h"
#include "base/death_mark.h"
#include "base/shared_memory.h"
#include "base/signals_blocked.h"
#include "engine/shell/channel.h"
#include "transport/socket_pipe.h"

namespace shoal {
namespace {

constexpr int kSleepMs = 100;  // the tick of heartbeats and deadlines
constexpr uint32_t kKick = 0;
static_assert(ProgressThread::kMost == PathMaker::kMostChannels);

uint64_t tag_of(uint32_t channel, int peer) {
  return uint64_t{channel} << 32 | static_cast<uint32_t>(peer);
}

// A doorbell's socket is not always read to its end.
uint32_t events_of(int peer) {
  if (peer == Channel::kDoorbell) return EPOLLIN;
  return peer < 0 ? EPOLLIN | EPOLLET : EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
}

}  // namespace

ProgressThread& ProgressThread::of(int channel) {
  // Never destroyed: channels may outlive static destructors.
  static const std::vector<ProgressThread*>* const threads = [] {
    // Fork handlers registered last are called first. Ours must take its locks before those of the
    // regions and the marks, which channels take under ours.
    Regions::of_process();
    DeathMark::prepare_for_forks();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    auto* all = new std::vector<ProgressThread*>;
    for (int number = 0; number < kMost; ++number) all->push_back(new ProgressThread(number));
    return all;
  }();
  return *(*threads)[static_cast<size_t>(channel)];
}

Error ProgressThread::start() {
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  {
    std::lock_guard kicking(kicking_);
    kick_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  Error error;
  if (epoll_fd_ < 0 || kick_fd_ < 0)
    error = {Fault::kResource, -1,
             std::string("the progress thread got no descriptors: ") + std::strerror(errno) +
                 "; raise the limit of open files (ulimit -n)"};
  if (!error) error = watch(kick_fd_, tag_of(kKick, 0), EPOLLIN | EPOLLET);
  if (!error) error = start_thread();
  if (!error) return error;
  std::lock_guard kicking(kicking_);
  close_descriptors();
  return error;
}

Error ProgressThread::start_thread() {
  Error error;
  stop_ = false;
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
    std::string name = "shoal-progress";
    if (number_ > 0) name += std::to_string(number_);  // Linux accepts at most 15 letters
    pthread_setname_np(thread_.native_handle(), name.c_str());
  } catch (const std::exception& refused) {
    error = {Fault::kResource, -1,
             std::string("could not start a thread: ") + refused.what() +
                 "; raise the limit of processes (ulimit -u) or the pids limit of the container"};
  }
  return error;
}

void ProgressThread::stop() {
  stop_ = true;
  asleep_ = true;
  kick();
  thread_.join();
  std::lock_guard kicking(kicking_);
  close_descriptors();
}

// Under kicking_.
void ProgressThread::close_descriptors() {
  for (int* fd : {&epoll_fd_, &kick_fd_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

Error ProgressThread::watch(int fd, uint64_t tag, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) == 0) return {};
  return {Fault::kResource, -1,
          "the progress thread cannot watch descriptor " + std::to_string(fd) + ": " +
              std::strerror(errno) +
              "; free memory, or raise the limit of watches (fs.epoll.max_user_watches)"};
}

Error ProgressThread::add(const std::shared_ptr<Channel>& channel) {
  std::lock_guard life(life_);
  if (!thread_.joinable())
    if (Error error = start()) return error;
  Error error = enter(channel);
  if (error && channels_.empty()) stop();  // `channels_` changes only under `life_`
  return error;
}

Error ProgressThread::enter(const std::shared_ptr<Channel>& channel) {
  const auto watched = channel->watched();
  std::lock_guard lock(mutex_);
  const uint32_t id = next_id_++;
  for (auto one = watched.begin(); one != watched.end(); ++one) {
    Error error = watch(one->fd, tag_of(id, one->peer), events_of(one->peer));
    if (!error) continue;
    while (one != watched.begin()) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, (--one)->fd, nullptr);
    return error;
  }
  channels_[id] = {channel, watched};
  asleep_ = true;
  kick();
  return {};
}

Error ProgressThread::watch_also(const Channel* channel, Watched one) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : channels_)
    if (entry.channel.get() == channel)
      return watch(one.fd, tag_of(id, one.peer), events_of(one.peer));
  return {Fault::kInternal, -1, "the progress thread does not know this channel"};
}

void ProgressThread::remove(const Channel* channel) {
  std::shared_ptr<Channel> keep;  // destroyed after our locks are released
  std::lock_guard life(life_);
  bool last = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(channels_.begin(), channels_.end(), [&](const auto& entry) {
      return entry.second.channel.get() == channel;
    });
    if (found == channels_.end()) return;
    keep = std::move(found->second.channel);
    // The links closed their descriptors, which left the epoll set by that; the doorbell's is ours.
    for (const auto& [fd, peer] : found->second.watched)
      if (peer < 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
    channels_.erase(found);
    last = channels_.empty();
  }
  if (last) stop();
}

void ProgressThread::kick() {
  if (!asleep_.exchange(false)) return;
  std::lock_guard kicking(kicking_);
  if (kick_fd_ < 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(kick_fd_, &one, sizeof(one));
}

void ProgressThread::dispatch(uint64_t tag, bool ended) {
  const auto id = static_cast<uint32_t>(tag >> 32);
  if (id == kKick) return;
  std::shared_ptr<Channel> channel;
  {
    std::lock_guard lock(mutex_);
    const auto found = channels_.find(id);
    if (found != channels_.end()) channel = found->second.channel;
  }
  if (channel != nullptr) channel->on_event(static_cast<int>(static_cast<uint32_t>(tag)), ended);
}

void ProgressThread::run() {
  bool more = false;
  while (!stop_) {
    try {
      more = round(more);
    } catch (const std::bad_alloc&) {  // for the list below; channels see to themselves
    }
  }
}

// Sleeps unless there is `more` to do, and then gives each channel a turn. True if there is more.
bool ProgressThread::round(bool more) {
  std::vector<std::shared_ptr<Channel>> channels;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, entry] : channels_) channels.push_back(entry.channel);
  }
  if (!more) {
    // Arm before the last look: from here on new work makes a descriptor readable.
    asleep_ = true;
    for (const auto& channel : channels) more |= !channel->may_sleep();
  }
  epoll_event events[64];
  const int n = epoll_wait(epoll_fd_, events, 64, more ? 0 : kSleepMs);
  asleep_ = false;
  for (int i = 0; i < n; ++i)
    dispatch(events[i].data.u64, (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
  more = false;
  const int64_t now = now_ns();
  for (const auto& channel : channels) more |= channel->turn(now);
  return more;
}

void ProgressThread::before_fork() {
  for (int number = 0; number < kMost; ++number) of(number).life_.lock();
  PathMaker::forking().lock();
  for (int number = 0; number < kMost; ++number) of(number).mutex_.lock();
  for (int number = 0; number < kMost; ++number) of(number).kicking_.lock();
  SocketPipe::forking().lock();
}

void ProgressThread::after_fork_in_parent() {
  SocketPipe::forking().unlock();
  for (int number = 0; number < kMost; ++number) of(number).kicking_.unlock();
  for (int number = 0; number < kMost; ++number) of(number).mutex_.unlock();
  PathMaker::forking().unlock();
  for (int number = 0; number < kMost; ++number) of(number).life_.unlock();
}

void ProgressThread::after_fork_in_child() {
  for (int number = 0; number < kMost; ++number) of(number).forsake();
  SocketPipe::forsake_all();
  after_fork_in_parent();
}

// Only this thread exists now. Close without sending: the parent still uses these sockets.
void ProgressThread::forsake() {
  for (auto& [id, entry] : channels_) {
    entry.channel->forsake();
    new std::shared_ptr<Channel>(
        std::move(entry.channel));  // leaked: its lock may be held for ever
  }
  channels_.clear();
  if (!thread_.joinable()) return;
  close_descriptors();
  new std::thread(std::move(thread_));  // leaked: there is no such thread to join
}

}  // namespace shoal
