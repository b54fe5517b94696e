// Frames over one stream socket (TCP; a Unix stream socket works as well).
#pragma once

#include <deque>
#include <vector>

#include "transport/link.h"

namespace shoal {

// Owns `fd`, connected and authenticated already; makes it non-blocking.
//
// Headers and payloads carry CRC32C: TCP's own checksum lets about one damaged packet in ten
// million through (Stone & Partridge, SIGCOMM 2000).
class TcpLink final : public Link {
 public:
  TcpLink(int peer, int fd, uint64_t epoch);
  ~TcpLink() override;

  bool send(const Frame& frame) override;
  bool flush(FrameSink& sink) override;
  bool pump(FrameSink& sink) override;
  bool has_queued() const override { return !queue_.empty(); }
  LinkState state() const override;
  void disown(const std::byte* from, size_t n_bytes) override;
  bool lingers() override;
  void close() override;
  void forsake() override;
  size_t max_inline() const override { return kEagerBytes; }

  int fd() const { return fd_; }
  // Whether the last pump() saw the socket empty, or ended: the kernel will tell when more comes.
  bool is_drained() const { return drained_ || fd_ < 0 || refused_; }
  // The peer will send no more: from here on, drained means that its end was read.
  void expect_end() { ending_ = true; }

  // Flows up to this size go without asking. Larger costs the receiver memory when it is late,
  // smaller costs a round trip for what is cheap to keep.
  static constexpr size_t kEagerBytes = 64u << 10;

 private:
  struct Queued {
    Frame frame;
    std::vector<std::byte> owned;  // payload copied because it was small or disowned
    size_t n_sent = 0;             // of header and payload together
    bool sealed = false;           // its checksums are taken; a full socket may try it many times
    bool waited = false;           // since then: the payload may have changed meanwhile

    const std::byte* payload() const { return owned.empty() ? frame.bytes() : owned.data(); }
    size_t size() const { return sizeof(Header) + frame.header.length; }
    bool is_spoiled() const {
      return waited && frame.payload != nullptr &&
             crc32c(0, payload(), frame.header.length) != frame.header.payload_crc;
    }
    bool is_data_at_rest() const { return n_sent == 0 && frame.header.type == FrameType::kData; }
  };

  void seal(Queued& queued);
  void let_go(const std::byte* from, size_t n_bytes);
  bool read_some(FrameSink& sink);
  bool parse(FrameSink& sink);
  bool begin_frame(FrameSink& sink);
  bool end_frame(FrameSink& sink);
  void fail(FrameSink& sink, const std::string& what);
  void refuse(FrameSink& sink, const std::string& what);

  const int peer_;
  int fd_;
  const uint64_t epoch_;
  std::deque<Queued> queue_;
  uint64_t n_full_ = 0;  // how often the socket took less than it was given

  bool refused_ = false;  // broken, for what the peer sent
  bool drained_ = false;
  bool ending_ = false;
  std::vector<std::byte> ahead_;  // bytes read past what was asked for
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  bool in_payload_ = false;
  Header header_;
  std::span<std::byte> landing_;
  size_t n_landed_ = 0;
  std::vector<std::byte> diverted_;
};

}  // namespace shoal
