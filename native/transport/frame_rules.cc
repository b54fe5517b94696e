#include "transport/frame_rules.h"

#include <array>

namespace shoal {
namespace {

constexpr uint8_t kOverBoth = kOverRing | kOverTcp;

constexpr std::array kRules = {
    FrameRule{FrameType::kPost, "post", kOverBoth, 0, Carries::kLengths,
              "a member that has posted the call, to each peer that gets no small data of it",
              "I have posted this call; for some, the bytes that I send you and take from you",
              "grants, data and offers"},
    FrameRule{FrameType::kGrant, "grant", kOverBoth, 0, Carries::kPlace,
              "the receiver of a flow, once there is room for the segments",
              "send segments below `segment` of your flow; for some, the place to put them, and "
              "the implicit clear to send",
              "data, offer or put complete"},
    FrameRule{FrameType::kData, "data", kOverBoth, kEager, Carries::kSegment,
              "the sender of a flow: what was granted, or eagerly what its allowance holds",
              "one segment, in the payload", "credit, if it was eager"},
    FrameRule{FrameType::kOffer, "offer", kOverRing, kInSlot, Carries::kPlace,
              "the sender of a flow, once its segments are ready",
              "`count` segments from `segment` on lie in my shared memory", "consumed"},
    FrameRule{FrameType::kConsumed, "consumed", kOverRing, kInSlot, Carries::kNothing,
              "the receiver of a flow, once it has used what was offered",
              "I have consumed the segments below `segment` of your flow; or a slot is free",
              "nothing"},
    FrameRule{FrameType::kPutComplete, "put complete", kOverRing, 0, Carries::kNothing,
              "the sender of a flow, once it was granted a place",
              "the `count` segments below `segment` lie where you granted", "nothing"},
    FrameRule{FrameType::kRequestToSend, "request to send", kOverBoth, 0, Carries::kNothing,
              "the sender of a short flow, once its allowance is spent", "please grant this flow",
              "grant"},
    FrameRule{FrameType::kCredit, "credit", kOverBoth, 0, Carries::kPlace,
              "the receiver of eager data, once it has used half an allowance",
              "this much of your eager allowance is free again", "nothing"},
    FrameRule{FrameType::kDisagree, "disagree", kOverBoth, 0, Carries::kText,
              "a member that finds another call under its key, once", "my call under this key",
              "abort"},
    FrameRule{FrameType::kAbort, "abort", kOverBoth, 0, Carries::kText,
              "a member that ends the group or learns of its end, to its neighbours, once",
              "this group ends, and why", "nothing of the group; or unmade"},
    FrameRule{FrameType::kLost, "lost", kOverBoth, 0, Carries::kText,
              "a rank that finds or learns it, to its neighbours and to rank `flow`, once",
              "rank `flow` is lost and why: rank `segment` has given it up (`count` 0), or is cut "
              "off from it (1), or found it dead (2)",
              "nothing, if the two are you and the sender"},
    FrameRule{FrameType::kGoodbye, "goodbye", kOverBoth, 0, Carries::kNothing, "a rank that leaves",
              "orderly end", "nothing"},
    FrameRule{FrameType::kHeartbeat, "heartbeat", kOverBoth, 0, Carries::kNothing,
              "any rank, over TCP every 0.5 s, if it sent nothing else", "I am here", "nothing"},
    FrameRule{FrameType::kRegion, "region", kOverSocket, 0, Carries::kPlace,
              "the owner of shared memory, before it grants or offers a place in it",
              "a shared region, with its descriptor", "grants and offers that name it"},
    FrameRule{FrameType::kRelease, "release", kOverSocket, 0, Carries::kPlace,
              "the owner of shared memory, once it is gone", "drop your mapping of this region",
              "nothing"},
    FrameRule{FrameType::kAck, "ack", kOverTcp, 0, Carries::kNothing,
              "a link with frames to acknowledge, if no other frame goes back",
              "the acknowledgement in the header", "nothing"},
    FrameRule{FrameType::kAsk, "ask", kOverBoth, 0, Carries::kNothing,
              "a rank that cannot reach rank `flow`; then the asked rank, to rank `flow`",
              "do you receive from rank `flow`? If that is you: are you alive?", "answer"},
    FrameRule{FrameType::kAnswer, "answer", kOverBoth, 0, Carries::kNothing, "the asked rank, once",
              "I do not receive from rank `flow` (`count` 0), I do (1), or it has left (2)",
              "lost, or nothing"},
    FrameRule{FrameType::kUnmade, "unmade", kOverBoth, 0, Carries::kNothing,
              "a rank that learns the end of a group whose members it does not know (any more)",
              "I cannot pass this on", "nothing"},
    FrameRule{FrameType::kCommit, "commit", kOverBoth, 0, Carries::kNothing,
              "a worker, to a server whose results are all in place; a server with the commits of "
              "all its workers, to each",
              "I hold all results of yours; all workers hold mine",
              "commit, of a server; nothing of this call"},
};

constexpr bool are_in_order() {
  for (size_t at = 0; at < kRules.size(); ++at)
    if (static_cast<size_t>(kRules[at].type) != at + 1) return false;
  return true;
}
static_assert(are_in_order());

bool may_carry(Carries what, size_t n_bytes) {
  switch (what) {
    case Carries::kNothing:
      return n_bytes == 0;
    case Carries::kPlace:
      return n_bytes == sizeof(Place);
    case Carries::kLengths:
      return n_bytes == 0 || n_bytes == sizeof(Lengths);
    case Carries::kSegment:
      return n_bytes > 0 && n_bytes <= Header::kMaxPayload;
    case Carries::kText:
      return n_bytes <= kMaxText;
  }
  return false;
}

}  // namespace

std::span<const FrameRule> frame_rules() { return kRules; }

std::string broken_rule(const Header& header, size_t n_bytes, uint8_t over) {
  const size_t at = static_cast<size_t>(header.type) - 1;
  if (at >= kRules.size())
    return "sent a frame of unknown type " + std::to_string(static_cast<int>(header.type));
  const FrameRule& rule = kRules[at];
  const std::string frame = std::string("sent a frame `") + rule.name + "` ";
  if ((rule.over & over) == 0)
    return frame + (over == kOverTcp ? "of shared memory over a network" : "over a ring");
  if ((header.flags & ~(rule.flags | Header::kPathFlags)) != 0)
    return frame + "with flags " + std::to_string(header.flags);
  if (!may_carry(rule.carries, n_bytes))
    return frame + "with " + std::to_string(n_bytes) + " B of payload";
  return {};
}

}  // namespace shoal
