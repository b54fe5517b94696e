// Every implementation of Link, for the tests of link.h's contract.
#pragma once

#include <algorithm>

#include "test/links.h"
#include "transport/shm_link.h"

namespace shoal::test {

struct ShmPair final : Pair {
  ShmPair() {
    CHECK(!Arena::create(2, arenas[0]));
    CHECK(!Arena::enter(dup(arenas[0].memory_fd()), 2, 1, arenas[1]));
    for (const int end : {0, 1}) {
      auto link = std::make_unique<ShmLink>(1 - end, arenas[static_cast<size_t>(end)], 1 - end);
      CHECK(!link->open());
      links[static_cast<size_t>(end)] = std::move(link);
    }
  }
  ~ShmPair() override { links = {}; }

  std::array<Arena, 2> arenas;
};

struct Maker {
  const char* name;
  std::unique_ptr<Pair> (*make)();
  size_t largest;  // payload that may be sent
  bool in_order = true;
  bool lands = true;    // into receive_buffer()'s memory, not its own
  bool borrows = true;  // large payloads belong to the caller until sent()
};

// A line here adds another implementation to the contract's tests.
inline const Maker kMakers[] = {
    {"fake", [] { return std::unique_ptr<Pair>(new FakePair(fake_options())); }, 1u << 20},
    {"fake with little room, late and in pieces",
     [] {
       FakeNet::Options options = fake_options();
       options.room = 3;
       options.delays = options.splits = options.reads_late = options.reports_late = 0.5;
       options.releases_late = 0.5;
       return std::unique_ptr<Pair>(new FakePair(options));
     },
     1u << 20},
    {"fake that reorders",
     [] {
       FakeNet::Options options = fake_options();
       options.reorders = options.delays = options.reports_late = 0.5;
       return std::unique_ptr<Pair>(new FakePair(options));
     },
     1u << 20, false},
    {"fake within a host",
     [] {
       FakeNet::Options options = fake_options();
       options.shares_memory = true;
       options.max_inline = 16 << 10;
       return std::unique_ptr<Pair>(new FakePair(options));
     },
     16 << 10, true, false},
    {"fake within a host, late",
     [] {
       FakeNet::Options options = fake_options();
       options.shares_memory = true;
       options.max_inline = 16 << 10;
       options.moves_late = options.releases_late = 0.7;
       return std::unique_ptr<Pair>(new FakePair(options));
     },
     16 << 10, true, false},
    {"tcp over a Unix socket", [] { return std::unique_ptr<Pair>(new TcpPair({unix_sockets()})); },
     1u << 20},
    {"tcp", [] { return std::unique_ptr<Pair>(new TcpPair({tcp_sockets()})); }, 1u << 20},
    {"tcp over two paths",
     [] { return std::unique_ptr<Pair>(new TcpPair({unix_sockets(), tcp_sockets()})); }, 1u << 20,
     false},
    {"fake paths that break",
     [] {
       FakeNet::Options options = fake_options();
       options.n_paths = 4;
       options.path_cuts = 0.002;
       options.delays = options.splits = 0.3;
       return std::unique_ptr<Pair>(new FakePair(options));
     },
     1u << 17, false},
    {"shm", [] { return std::unique_ptr<Pair>(new ShmPair); }, Arena::max_inline(2), true, false,
     false},
};

template <class Try>
void for_every_link(Try try_one) {
  for (const Maker& maker : kMakers) {
    const int before = failures_of_this_test();
    const auto pair = maker.make();
    try_one(*pair, maker);
    if (failures_of_this_test() > before) fail(__FILE__, __LINE__, std::string("on ") + maker.name);
  }
}

}  // namespace shoal::test
