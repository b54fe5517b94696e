// The order in which waiting frames for a peer leave.
#include <string>
#include <vector>

#include "test/check.h"
#include "transport/outbox.h"

namespace shoal::test {
namespace {

const std::vector<std::byte> kSegment(1000);

Outbox::Sizes sizes() {
  Outbox::Sizes sizes;
  sizes.copied = sizes.small = 100;
  return sizes;
}

Frame bulk(uint64_t call, uint32_t steps_left, uint64_t key) {
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(kSegment.size());
  frame.header.key = key;
  frame.payload = kSegment.data();
  frame.is_lent_by_call = true;
  frame.token = key;
  frame.precedence = {call, steps_left};
  return frame;
}

Frame word(FrameType type, uint64_t key) {
  Frame frame;
  frame.header.type = type;
  frame.header.key = key;
  return frame;
}

std::vector<uint64_t> pulled(Outbox& outbox) {
  std::vector<uint64_t> keys;
  while (Outgoing* out = outbox.pull(0, true)) {
    keys.push_back(out->frame.header.key);
    outbox.written(*out);
  }
  return keys;
}

using Keys = std::vector<uint64_t>;

}  // namespace

TEST("within a call, data with fewer earlier steps leaves first, in segment order") {
  Outbox outbox(sizes());
  for (uint64_t key : {1, 2}) outbox.send(bulk(1, 6, key));
  for (uint64_t key : {3, 4}) outbox.send(bulk(1, 5, key));
  outbox.send(bulk(1, 6, 5));
  CHECK(pulled(outbox) == (Keys{3, 4, 1, 2, 5}));
}

TEST("data of an older call leaves first, however far a newer call has got") {
  Outbox outbox(sizes());
  outbox.send(bulk(2, 1, 1));
  outbox.send(bulk(1, 6, 2));
  CHECK(pulled(outbox) == (Keys{2, 1}));
}

TEST("a closing frame waits for all frames before it, and none overtakes it") {
  for (const FrameType ending : {FrameType::kAbort, FrameType::kLost, FrameType::kGoodbye}) {
    Outbox outbox(sizes());
    outbox.send(bulk(5, 6, 1));
    outbox.send(word(ending, 2));
    outbox.send(bulk(3, 6, 3));
    outbox.send(word(FrameType::kAbort, 4));
    outbox.send(bulk(2, 1, 5));
    outbox.send(bulk(1, 1, 6));
    CHECK(pulled(outbox) == (Keys{1, 2, 3, 4, 6, 5}));
    outbox.send(bulk(5, 6, 7));  // and again without a closing frame
    outbox.send(bulk(5, 5, 8));
    CHECK(pulled(outbox) == (Keys{8, 7}));
  }
}

TEST("a frame whose memory is revoked still requests acknowledgement of the frames before it") {
  Outbox outbox(sizes());
  outbox.send(bulk(1, 1, 1));
  outbox.send(bulk(2, 1, 2));
  Outgoing* first = outbox.pull(0, true);
  Outgoing* second = outbox.pull(0, true);
  CHECK((first->frame.header.flags & kAckSoon) == 0 &&
        (second->frame.header.flags & kAckSoon) != 0);
  outbox.release({0, 2});
  CHECK_EQ(second->frame.header.length, 0u);
  CHECK((second->frame.header.flags & kAckSoon) != 0);
}

}  // namespace shoal::test
