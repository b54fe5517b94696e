// The streams of the seeded network: TcpLink runs over them as over sockets.
#pragma once

#include <cstdint>
#include <deque>

#include "transport/pipe.h"

namespace shoal {

class FakeNet;

// One way of one path between two ranks, as a kernel holds it.
struct FakeStream {
  std::deque<std::byte> bytes;
  bool is_ended = false;   // nothing more is written
  bool is_cut = false;     // nor can it be; what is left may be read before the reader hears so
  bool is_unread = false;  // its reader is gone
};

class FakePipe final : public Pipe {
 public:
  FakePipe(FakeNet& net, int rank, int peer, uint32_t path);
  ~FakePipe() override;

  ssize_t write(const iovec* vectors, size_t n_vectors) override;
  ssize_t read(const iovec* vectors, size_t n_vectors) override;
  void end(bool both) override;

 private:
  FakeStream& out();
  FakeStream& in();

  FakeNet& net_;
  const int rank_, peer_;
  const uint32_t path_;
};

}  // namespace shoal
