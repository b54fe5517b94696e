// The socket that wakes a process and takes descriptors: which processes may ring, which are
// accepted, and what happens to a message that cannot be sent now.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>

#include "test/links.h"
#include "transport/arena.h"
#include "transport/shm_link.h"

namespace shoal::test {
namespace {

bool is_rung(int fd) {
  pollfd watched{fd, POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

sockaddr_un name_of(const DoorbellAddress& of) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path, of.name.data(), of.name.size());
  return at;
}
constexpr socklen_t kNameLength = offsetof(sockaddr_un, sun_path) + sizeof(DoorbellAddress{}.name);

// A stranger that has found the socket's name and has nothing else.
struct Stranger {
  Stranger() : fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {}
  ~Stranger() { close(fd); }
  void send(const DoorbellAddress& to, const void* bytes, size_t n_bytes,
            const std::vector<int>& riders = {}) const {
    const sockaddr_un at = name_of(to);
    iovec vector{const_cast<void*>(bytes), n_bytes};
    alignas(cmsghdr) char room[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_name = const_cast<sockaddr_un*>(&at);
    message.msg_namelen = kNameLength;
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (const size_t n_riding = riders.size() * sizeof(int); n_riding > 0) {
      message.msg_control = room;
      message.msg_controllen = CMSG_SPACE(n_riding);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(n_riding);
      std::memcpy(CMSG_DATA(header), riders.data(), n_riding);
    }
    sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  int fd;
};

// The ends of two processes, in one process.
struct Mates {
  Mates() {
    CHECK(!Arena::create(2, arenas[0]));
    CHECK(!Arena::enter(dup(arenas[0].memory_fd()), 2, 1, arenas[1]));
    for (const int end : {0, 1}) {
      links[static_cast<size_t>(end)] =
          std::make_unique<ShmLink>(1 - end, arenas[static_cast<size_t>(end)], 1 - end);
      CHECK(!link(end).open());
      sinks[static_cast<size_t>(end)].expected_peer = 1 - end;
    }
  }
  ~Mates() { links = {}; }
  // True if that end knows a region of its mate.
  bool reaches(int end, uint32_t region) {
    std::byte one{};
    return link(end).get(1, CallId{}, {region, 0}, {&one, 1}) == Moved::kDone;
  }
  ShmLink& link(int end) { return *links[static_cast<size_t>(end)]; }
  std::array<Arena, 2> arenas;
  std::array<Recorder, 2> sinks;
  std::array<std::unique_ptr<ShmLink>, 2> links;
};

struct Region {
  Region() { CHECK(!Regions::of_process().allocate(10'000, region)); }
  ~Region() { Regions::of_process().release(region.data); }
  Regions::Region region;
};

TEST("a ring of the doorbell wakes its watcher, until the ring is read") {
  DoorbellSocket one, other;
  CHECK(!one.open());
  CHECK(!other.open());
  CHECK(!is_rung(other.fd()));
  one.ring(other.address());
  CHECK(is_rung(other.fd()));
  CHECK(!is_rung(one.fd()));
  Note note;
  int fd = -1;
  CHECK(other.take(note, fd) == DoorbellSocket::Took::kRing);
  CHECK(other.take(note, fd) == DoorbellSocket::Took::kNothing);
}

TEST("a stranger's messages and descriptors never arrive, however many it sends") {
  DoorbellSocket mate;
  Arena own;
  CHECK(!mate.open());
  CHECK(!Arena::create(2, own));
  const DoorbellAddress& there = own.header().doorbell_address;
  const Stranger stranger;
  FakeRandom random(1);
  for (const size_t n_bytes : {0, 1, 15, 16, 17, 64, 95, 96, 97, 5000}) {
    const Bytes junk = random_bytes(random, n_bytes);
    stranger.send(there, junk.data(), junk.size());
    stranger.send(there, junk.data(), junk.size(), {0});
  }
  // All but the cookie is right, and all but one bit of that.
  Region shared;
  Note forged;
  forged.cookie = there.cookie;
  forged.header.type = FrameType::kRegion;
  forged.header.flow = 1;
  forged.place = {shared.region.id, 0, shared.region.size};
  for (size_t bit = 0; bit < 8 * forged.cookie.size(); ++bit) {
    forged.cookie = there.cookie;
    forged.cookie[bit / 8] ^= std::byte{1} << bit % 8;
    stranger.send(there, &forged, sizeof(forged), {shared.region.fd});
    stranger.send(there, forged.cookie.data(), forged.cookie.size());
  }
  CHECK(!is_rung(own.doorbell_socket().fd()));
  own.take_notes(true);
  CHECK(own.region(1, shared.region.id) == nullptr);
  mate.ring(there);
  CHECK(is_rung(own.doorbell_socket().fd()));
}

TEST("a note of an impossible region or for an unknown place is dropped") {
  Arena own;
  CHECK(!Arena::create(2, own));
  DoorbellSocket mate;
  CHECK(!mate.open());
  Region shared;
  const ArenaHeader& there = own.header();
  const auto send_note = [&](uint32_t from, uint64_t n_bytes, FrameType type) {
    Note note;
    note.header.type = type;
    note.header.flow = from;
    note.place = {shared.region.id, 0, n_bytes};
    CHECK(mate.hand_over(there.doorbell_address, note, shared.region.fd, there.life));
    own.take_notes(true);
  };
  send_note(2, shared.region.size, FrameType::kRegion);
  send_note(~0u, shared.region.size, FrameType::kRegion);
  send_note(~0u, shared.region.size, FrameType::kRelease);
  send_note(1, shared.region.size + 1, FrameType::kRegion);
  send_note(1, shared.region.size, FrameType::kOffer);
  CHECK(own.region(0, shared.region.id) == nullptr);
  CHECK(own.region(1, shared.region.id) == nullptr);
  send_note(1, shared.region.size, FrameType::kRegion);
  CHECK(own.region(1, shared.region.id) != nullptr);
  CHECK(own.region(0, shared.region.id) == nullptr);
  send_note(1, 0, FrameType::kRelease);
  CHECK(own.region(1, shared.region.id) == nullptr);
}

TEST("an unexpected second descriptor in a note is closed") {
  Arena own;
  CHECK(!Arena::create(2, own));
  Region shared;
  Note note;
  note.cookie = own.header().doorbell_address.cookie;
  note.header.type = FrameType::kRegion;
  note.header.flow = 1;
  note.place = {shared.region.id, 0, shared.region.size};
  const Stranger mate;
  const int free[] = {dup(0), dup(0)};  // the next free descriptors
  for (const int fd : free) close(fd);
  mate.send(own.header().doorbell_address, &note, sizeof(note),
            {shared.region.fd, shared.region.fd});
  own.take_notes(true);
  CHECK(own.region(1, shared.region.id) != nullptr);
  for (const int fd : free) CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

TEST("a descriptor is never sent to a process that took the name of a dead one") {
  const Stranger thief;
  DoorbellAddress freed;
  CHECK(!DoorbellSocket{}.open());
  {
    DoorbellSocket gone;
    CHECK(!gone.open());
    freed = gone.address();
  }
  const sockaddr_un at = name_of(freed);
  CHECK_EQ(bind(thief.fd, reinterpret_cast<const sockaddr*>(&at), kNameLength), 0);
  DoorbellSocket own;
  CHECK(!own.open());
  Region shared;
  for (const uint32_t word : {0u, DeathMark::kDied}) {
    const std::atomic<uint32_t> life{word};
    CHECK(!own.hand_over(freed, {}, shared.region.fd, life));
  }
  CHECK(!is_rung(thief.fd));
}

TEST("a region that meets a full queue can be handed over later") {
  Mates mates;
  std::vector<std::unique_ptr<Region>> regions;
  bool fits = true;
  while (fits && regions.size() < 1000) {
    regions.push_back(std::make_unique<Region>());
    fits = mates.link(0).share(regions.back()->region.id);
  }
  CHECK(!fits);
  const uint32_t id = regions.back()->region.id;
  CHECK(!mates.reaches(1, id));  // and reads everything there
  CHECK(mates.reaches(1, regions.front()->region.id));
  CHECK(mates.link(0).share(id));
  CHECK(mates.reaches(1, id));
}

TEST("a region that meets a want of descriptors can be handed over later") {
  Mates mates;
  Region shared, other;
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  CHECK(!mates.link(0).share(shared.region.id));
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(mates.link(0).share(shared.region.id));
  CHECK(mates.reaches(1, shared.region.id));
  // The descriptor is lost at the other end, and a caller that needs the region gets an error.
  CHECK(mates.link(0).share(other.region.id));
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  CHECK(!mates.reaches(1, other.region.id));
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST("a freed region is unmapped at the other end") {
  Mates mates;
  auto shared = std::make_unique<Region>();
  const uint32_t id = shared->region.id;
  CHECK(mates.link(0).share(id));
  CHECK(mates.reaches(1, id));
  mates.link(0).tick();
  mates.arenas[1].take_notes(true);
  CHECK(mates.reaches(1, id));
  shared.reset();
  mates.link(0).tick();
  mates.arenas[1].take_notes(true);
  CHECK(!mates.reaches(1, id));
}

TEST("a caller that looks for a region leaves the progress thread its ring") {
  Mates mates;
  mates.arenas[0].doorbell_socket().ring(mates.arenas[1].header().doorbell_address);
  CHECK(!mates.reaches(1, 12345));
  CHECK(is_rung(mates.arenas[1].doorbell_socket().fd()));
  mates.arenas[1].take_notes(true);
  CHECK(!is_rung(mates.arenas[1].doorbell_socket().fd()));
}

TEST("many alarms to a stopped peer leave at most two rings in its socket") {
  Mates mates;
  Frame goodbye;
  goodbye.header.type = FrameType::kGoodbye;
  for (int n = 0; n < 100; ++n) {
    mates.link(0).send(goodbye);
    mates.link(0).flush(mates.sinks[0]);
  }
  int n_rings = 0;
  Note note;
  int fd = -1;
  while (mates.arenas[1].doorbell_socket().take(note, fd) != DoorbellSocket::Took::kNothing)
    ++n_rings;
  CHECK_EQ(n_rings, 1);
}

TEST("the death of a peer's process is detected, and its earlier notes still arrive") {
  Mates mates;
  mates.link(1).send(data_frame({}, 5));
  mates.link(1).flush(mates.sinks[1]);
  mates.link(0).look(mates.sinks[0], 0);
  CHECK(!mates.sinks[0].is_over);
  mates.arenas[1].header().life.fetch_or(DeathMark::kDied);
  mates.link(0).look(mates.sinks[0], 0);
  CHECK_EQ(mates.sinks[0].came.size(), 1u);
  CHECK(mates.sinks[0].is_over);
  CHECK(has(mates.sinks[0].why.text, "its process died"));
  CHECK(mates.sinks[0].why.of_path);
  mates.link(0).look(mates.sinks[0], 0);
}

TEST("memory that a host-mate has not entered makes no link, and nothing is written to it") {
  Arena own;
  CHECK(!Arena::create(2, own));
  {
    ShmLink link(1, own, 1);
    CHECK(has(link.open().text, "has not entered"));
  }
  ArenaView mate;
  (void)own.mate(1, mate);
  CHECK_EQ(mate.ring(0).is_over.load(), 0u);
  CHECK(Arena::enter(dup(own.memory_fd()), 3, 1, *std::make_unique<Arena>()).fault ==
        Fault::kPeerLost);  // for another number of ranks
}

}  // namespace
}  // namespace shoal::test
