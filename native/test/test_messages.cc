// Point to point: receives from a named rank, and receives from any source.
#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

using Words = std::vector<uint32_t>;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A message of one tag; its contents identify the sender and the message's number.
struct Letter {
  Words words;
  std::shared_ptr<Call> handle;

  int source() const { return static_cast<int>(words.at(0) / 1000); }
  uint32_t nth() const { return words.at(0) % 1000; }
  bool is_whole() const {
    return std::all_of(words.begin(), words.end(), [&](uint32_t word) { return word == words[0]; });
  }
};

std::shared_ptr<Plan> plan_of_message(size_t n_words, int rank, int size, int from, int to) {
  Plan plan;
  plan.program = point_to_point(rank, size, from, to);
  plan.layout[kData] = equal_layout(n_words * 4, 1);
  auto sealed = seal(std::move(plan), DType::kUint32, FoldOp::kSum, 1, 256, "message");
  sealed->descriptor_hash = descriptor_hash_of("message of " + std::to_string(n_words));
  return sealed;
}

class Post {
 public:
  explicit Post(World& world) : world_(world), sent_(index(world.size())) {}

  void send(int from, int to, int64_t tag, size_t n_words) {
    const uint32_t nth = sent_[index(from)][tag]++;
    Letter& message = add({Words(n_words, static_cast<uint32_t>(from) * 1000 + nth), nullptr});
    message.handle =
        world_.engine(from).post(*world_.groups[index(from)],
                                 Message{plan_of_message(n_words, from, world_.size(), from, to),
                                         true, to, tag, bytes(message), World::kNever});
  }
  Letter& recv(int rank, int source, int64_t tag, size_t n_words,
               int64_t deadline_ns = World::kNever) {
    Letter& message = add({Words(n_words, ~0u), nullptr});
    const int from = source < 0 ? (rank + 1) % world_.size() : source;
    message.handle =
        world_.engine(rank).post(*world_.groups[index(rank)],
                                 Message{plan_of_message(n_words, rank, world_.size(), from, rank),
                                         false, source, tag, bytes(message), deadline_ns});
    return message;
  }
  bool all_finished() const {
    return std::all_of(all_.begin(), all_.end(),
                       [](const auto& one) { return one->handle->finished.load(); });
  }

 private:
  static size_t index(int rank) { return static_cast<size_t>(rank); }
  static std::byte* bytes(Letter& message) {
    return reinterpret_cast<std::byte*>(message.words.data());
  }
  Letter& add(Letter message) {
    return *all_.emplace_back(std::make_unique<Letter>(std::move(message)));
  }

  World& world_;
  std::vector<std::map<int64_t, uint32_t>> sent_;
  std::vector<std::unique_ptr<Letter>> all_;
};

World::Options options_for(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.max_inline = seed / 2 % 2 == 0 ? 64 : 1024;
  options.net.delays = options.net.reorders = options.net.splits = 0.2;
  options.net.reads_late = options.net.reports_late = 0.2;
  return options;
}

// ---- matching

void try_any_source(uint64_t seed) {
  const int size = 2 + static_cast<int>(seed % 4);
  constexpr int kEach = 4;
  World world(size, options_for(seed));
  FakeRandom random(seed);
  Post post(world);
  const size_t lengths[] = {1, 10 + random.below(50), 1000 + random.below(3000)};
  std::vector<Letter*> taken[3];
  // Sends and receives one at a time, in a random order on each rank.
  std::vector<std::pair<int, int>> to_do;  // rank, tag
  for (int tag = 0; tag < 3; ++tag)
    for (int rank = 0; rank < size; ++rank)
      for (int n = 0; n < (rank == 0 ? (size - 1) * kEach : kEach); ++n)
        to_do.emplace_back(rank, tag);
  for (const int at : world.shuffled(static_cast<int>(to_do.size()))) {
    const auto [rank, tag] = to_do[static_cast<size_t>(at)];
    if (rank == 0)
      taken[tag].push_back(&post.recv(0, -1, tag, lengths[tag]));
    else
      post.send(rank, 0, tag, lengths[tag]);
    if (random.chance(0.5)) world.step();
  }
  CHECK(world.run([&] { return post.all_finished(); }));
  for (int tag = 0; tag < 3; ++tag) {
    std::map<int, uint32_t> n_from;
    for (const Letter* message : taken[tag]) {
      if (message->handle->error || !message->is_whole() ||
          message->source() != message->handle->source ||
          message->nth() != n_from[message->source()]++)
        fail(__FILE__, __LINE__,
             "seed " + std::to_string(seed) + ": torn, out of order or of another source");
    }
    for (int rank = 1; rank < size; ++rank) CHECK_EQ(n_from[rank], kEach);
  }
  CHECK_EQ(world.net.violation(), "");
}

TEST("receives from any source take each message once, and each rank's messages in order") {
  for (uint64_t seed = 0; seed < seeds(80); ++seed) try_any_source(seed);
}

TEST("receives of one tag take messages in the order of their calls, whichever rank they name") {
  for (const bool sent_first : {false, true}) {
    World world(3, {});
    Post post(world);
    const auto send_all = [&] {
      post.send(1, 0, 5, 3);
      post.send(1, 0, 5, 3);
      world.run_steps(50);  // rank 1's message arrives first
      post.send(2, 0, 5, 3);
      world.run_steps(50);
    };
    if (sent_first) send_all();
    const Letter& any = post.recv(0, -1, 5, 3);
    const Letter& named = post.recv(0, 1, 5, 3);
    const Letter& last = post.recv(0, -1, 5, 3);
    const Letter& other_tag = post.recv(0, 1, 6, 3);
    if (!sent_first) send_all();
    world.run_steps(50);
    CHECK_EQ(any.words[0], 1000u);
    CHECK_EQ(named.words[0], 1001u);
    CHECK_EQ(last.words[0], 2000u);
    CHECK_EQ(last.handle->source, 2);
    CHECK(!other_tag.handle->finished);
    post.send(1, 0, 6, 3);
    CHECK(world.run([&] { return post.all_finished(); }, 100));
  }
}

TEST("a receive from any source on one tag blocks no other tag and no collective") {
  World world(2, {});
  Post post(world);
  const Letter& waiting = post.recv(0, -1, 1, 3);
  post.send(1, 0, 2, 3);
  const Letter& other = post.recv(0, 1, 2, 3);
  Job job;
  job.n_elems = 10;
  for (const int rank : {0, 1}) world.post(rank, job);
  CHECK(world.run_all(200));
  CHECK(other.handle->finished);
  CHECK(!waiting.handle->finished);
}

TEST("a message is pending from its first frame until a receive of its tag takes it") {
  World world(3, {});
  Post post(world);
  const auto is_here = [&](int from, int64_t tag) {
    return world.engine(0).has_message(*world.groups[0], from, tag);
  };
  CHECK(!is_here(1, 5));
  post.send(1, 0, 5, 3);
  post.send(1, 0, 5, 3);
  world.run_steps(50);
  CHECK(is_here(1, 5) && !is_here(2, 5) && !is_here(1, 6));
  post.recv(0, 1, 5, 3);
  CHECK(is_here(1, 5));
  post.recv(0, 1, 5, 3);
  CHECK(!is_here(1, 5));
  CHECK(world.run([&] { return post.all_finished(); }));
}

// ---- ends

TEST("a receive from any source has a deadline and names the ranks that it waited for") {
  World world(2, {});
  Post post(world);
  const Letter& waiting = post.recv(0, -1, 1, 3, world.now + 300 * kMillisecond);
  const Letter& behind = post.recv(0, 1, 1, 3);
  CHECK(world.run([&] { return post.all_finished(); }, 1000));
  for (const Letter* message : {&waiting, &behind}) {
    CHECK(message->handle->error.fault == Fault::kTimedOut);
    CHECK(has(message->handle->error.text, "waiting for a message to it"));
  }
}

TEST("a receive from any source ends when all others have left, and not before") {
  World world(3, {});
  Post post(world);
  const Letter& first = post.recv(0, -1, 1, 3);
  const Letter& second = post.recv(0, -1, 1, 3);
  world.leave(1);
  world.run_steps(300);
  CHECK(!first.handle->finished);
  post.send(2, 0, 1, 3);
  world.run_steps(300);
  CHECK(first.handle->finished && !first.handle->error);
  CHECK(!second.handle->finished);
  world.leave(2);
  CHECK(world.run([&] { return second.handle->finished.load(); }, 1000));
  CHECK(second.handle->error.fault == Fault::kPeerLost);
  // Later calls fail too.
  CHECK(post.recv(0, -1, 1, 3).handle->error.fault == Fault::kPeerLost);
}

TEST("a message that has arrived is taken even if its sender has left") {
  World world(2, {});
  Post post(world);
  post.send(1, 0, 1, 3);
  world.run_steps(50);
  world.leave(1);
  world.run_steps(300);
  const Letter& taken = post.recv(0, -1, 1, 3);
  CHECK(taken.handle->finished && !taken.handle->error);
  CHECK_EQ(taken.words[2], 1000u);
  CHECK(post.recv(0, -1, 1, 3).handle->error.fault == Fault::kPeerLost);
}

TEST("a receive from any source fails with its group, whatever ends the group") {
  World world(3, {});
  Post post(world);
  const Letter& waiting = post.recv(0, -1, 1, 3);
  world.kill(2);
  CHECK(world.run([&] { return waiting.handle->finished.load(); }, 20'000));
  CHECK(waiting.handle->error.fault == Fault::kPeerLost);
  CHECK_EQ(waiting.handle->error.peer, 2);
}

TEST("a message of another length is a disagreement that names both calls") {
  World world(2, {});
  Post post(world);
  const Letter& waiting = post.recv(0, -1, 1, 3);
  post.send(1, 0, 1, 4);
  CHECK(world.run([&] { return waiting.handle->finished.load(); }, 1000));
  CHECK(waiting.handle->error.fault == Fault::kMismatch);
  CHECK(has(waiting.handle->error.text, World::name(0) + " called message"));
  CHECK(has(waiting.handle->error.text, World::name(1) + " called message"));
}

}  // namespace
}  // namespace shoal::test
