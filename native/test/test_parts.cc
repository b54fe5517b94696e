// Parts of the engine by themselves: their counts, their memory and their order.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "engine/segments/credits.h"
#include "engine/segments/finished_calls.h"
#include "engine/segments/message_counts.h"
#include "engine/segments/program_builder.h"
#include "engine/segments/steps.h"
#include "test/check.h"

namespace shoal::test {
namespace {

// Records the headers that were sent.
class Noted final : public Link {
 public:
  explicit Noted(std::vector<Frame>& frames) : frames_(frames) {}
  bool send(const Frame& frame) override {
    frames_.push_back(frame);
    return true;
  }
  bool flush(FrameSink&) override { return false; }
  bool pump(FrameSink&) override { return false; }
  bool has_queued() const override { return false; }
  bool release(uint64_t, const CallId&) override { return true; }
  void close() override {}
  const char* kind() const override { return "fake"; }
  size_t max_inline() const override { return 1024; }

 private:
  std::vector<Frame>& frames_;
};

TEST("a rank stops at its eager allowance, and continues as credit returns") {
  const int64_t now = 0;
  Traffic traffic(2);
  Links links(2, traffic, now);
  Credits credits(links, 2, 4 * 10'000);  // an allowance of 10,000 bytes
  CHECK_EQ(credits.reserve_bytes(), 10'000u);
  int n_sent = 0;
  for (; credits.may_send(1, 744) && n_sent < 100; ++n_sent) credits.sent(1, 744);
  CHECK_EQ(n_sent, 10);  // each counts 256 bytes more
  credits.came_back(1, 2'000);
  CHECK(credits.may_send(1, 744));
  credits.came_back(1, ~uint64_t{0});  // a liar gives back more than it took
  CHECK_EQ(credits.out_bytes(1), 0u);
}

TEST("used allowance is returned half of it at a time") {
  const int64_t now = 0;
  std::vector<Frame> frames;
  Traffic traffic(2);
  Links links(2, traffic, now);
  links.set(1, std::make_unique<Noted>(frames));
  Credits credits(links, 2, 4 * 10'000);
  for (int n = 0; n < 9; ++n) {
    CHECK(credits.came(1, 744));
    credits.used(1, 744);
  }
  CHECK_EQ(frames.size(), 1u);
  if (frames.empty()) return;
  CHECK(frames[0].header.type == FrameType::kCredit);
  Place place;
  std::memcpy(&place, frames[0].small.data(), sizeof(place));
  CHECK_EQ(place.offset, 5'000u);
}

TEST("a peer that sends a mebibyte unasked and takes nothing back exceeds its limit") {
  const int64_t now = 0;
  Traffic traffic(2);
  Links links(2, traffic, now);
  Credits credits(links, 2, 4 * 10'000);
  int n_came = 0;
  while (credits.came(1, 768) && n_came < 10'000) ++n_came;
  CHECK_EQ(n_came, 1024);
}

TEST("a finished call is known by its key while few others have finished since") {
  FinishedCalls finished;
  const auto plan = std::make_shared<Plan>();
  plan->descriptor = "a sum";
  for (uint64_t key = 1; key <= 5000; ++key) {
    finished.launched(key);
    finished.remember(key, key == 1 || key == 5000 ? plan : std::make_shared<Plan>());
  }
  CHECK(finished.past(5000).plan == plan);
  CHECK(finished.past(1).plan == nullptr);
  CHECK_EQ(finished.keys().size(), 4096u);
  CHECK(finished.is_forgotten(1));
  CHECK(!finished.is_forgotten(5000 - 4096));
  CHECK(!finished.is_forgotten(5001));
  CHECK(!finished.is_forgotten(~uint64_t{0}));  // keys of messages do not show their order
}

TEST("finished calls of many chunks are forgotten sooner") {
  FinishedCalls finished;
  const auto plan = std::make_shared<Plan>();
  plan->layout[0].n_bytes.assign(1 << 19, 1);
  for (uint64_t key = 1; key <= 4; ++key) finished.remember(key, plan);
  CHECK_EQ(finished.keys().size(), 2u);
  finished.remember(4, std::make_shared<Plan>());  // the same key again: the later call counts
  finished.remember(5, plan);
  CHECK_EQ(finished.keys().size(), 3u);
}

TEST("both ends of a message derive the same key, and no other message has it") {
  MessageCounts sender, receiver;
  std::vector<uint64_t> keys;
  for (const int64_t tag : {0, 1, -1})
    for (const auto& [from, to] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{0, 2}})
      for (int n = 0; n < 3; ++n) {
        const uint64_t key = sender.take(from, to, tag);
        CHECK_EQ(key, receiver.next(from, to, tag));
        CHECK_EQ(key, receiver.take(from, to, tag));
        CHECK(is_message(key));
        keys.push_back(key);
      }
  std::sort(keys.begin(), keys.end());
  CHECK(std::adjacent_find(keys.begin(), keys.end()) == keys.end());
  CHECK(!sender.may_take(5, 6, 7, 9));  // nine pairs of ranks and a tag are counted
  CHECK(sender.may_take(5, 6, 7, 10));
  CHECK(sender.may_take(0, 1, 0, 9));
}

// A call of one send in eight segments, which another step waits for.
struct Sending {
  Sending() {
    ProgramBuilder steps(2);
    steps.send(1, 0);
    steps.finish(0);
    plan->program = steps.done();
    plan->layout[0].offset = {0};
    plan->layout[0].n_bytes = {8 * 64};
    plan->segment_bytes = 64;
    plan->index();
    call->plan = plan;
    call->members = &members;
    call->state.resize(2);
    for (StepState& state : call->state) state.n_segments = 8;
    call->steps_left = 2;
  }
  // The steps that are made ready, last first.
  std::vector<uint32_t> ready() {
    std::vector<uint32_t> all;
    uint32_t at = 0;
    while (steps.next(at) != nullptr) all.push_back(at);
    return all;
  }

  const std::vector<int> members = {0, 1};
  const int64_t now = 0;
  std::shared_ptr<Plan> plan = std::make_shared<Plan>();
  std::shared_ptr<Call> call = std::make_shared<Call>();
  Traffic traffic{2};
  Steps steps{traffic, now};
};

TEST("a step is not done while a segment of it is still borrowed") {
  Sending send;
  const StepState& state = send.call->state[0];
  send.steps.complete(*send.call, 0, 2);
  CHECK_EQ(state.done, 0u);
  CHECK(send.ready().empty());
  send.steps.complete(*send.call, 0, 0);
  CHECK_EQ(state.done, 1u);
  CHECK_EQ(send.ready().front(), 1u);  // the step that waited for it goes first
  send.steps.complete(*send.call, 0, 1);
  CHECK_EQ(state.done, 3u);
  send.steps.complete(*send.call, 0, 6);
  send.steps.complete_below(*send.call, 0, 6);
  CHECK_EQ(state.done, 7u);
  CHECK_EQ(send.traffic[1].n_bytes_out, 7u * 64);
  CHECK(!send.call->is_through);
}

TEST("a call is done with its last step, and not before") {
  Sending send;
  send.steps.advance(*send.call, 0, 8);
  CHECK(!send.call->is_through);
  send.steps.advance(*send.call, 1, 7);
  CHECK(!send.call->is_through);
  send.steps.advance(*send.call, 1, 8);
  CHECK(send.call->is_through);
}

}  // namespace
}  // namespace shoal::test
