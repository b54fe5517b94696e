// A fusion buffer is full when all its entries are counted, in whatever order.

#include <algorithm>
#include <random>
#include <vector>

#include "base/countdown.h"
#include "test/check.h"

namespace shoal::test {
namespace {

// Four entries in three buffers: entry 1 spans all of them.
Countdown laid_out() {
  Countdown countdown;
  countdown.lay_out({{0}, {0, 1, 2}, {2}, {2}}, 3);
  return countdown;
}

std::vector<uint32_t> counted(Countdown& countdown, uint32_t entry) {
  std::vector<uint32_t> filled;
  CHECK(countdown.count(entry, [&](uint32_t buffer) {
    filled.push_back(buffer);
    return true;
  }));
  return filled;
}

using Numbers = std::vector<uint32_t>;

TEST("the last entry of a buffer reports it, in whatever order the entries come") {
  std::vector<uint32_t> order{0, 1, 2, 3};
  Countdown countdown = laid_out();
  do {
    countdown.begin();
    std::vector<bool> has(4, false);
    for (const uint32_t entry : order) {
      has[entry] = true;
      Numbers expected;
      if (entry <= 1 && has[0] && has[1]) expected.push_back(0);
      if (entry == 1) expected.push_back(1);
      if (entry >= 1 && has[1] && has[2] && has[3]) expected.push_back(2);
      CHECK(counted(countdown, entry) == expected);
    }
    CHECK(countdown.order() == order);
  } while (std::ranges::next_permutation(order).found);
}

TEST("an entry counted twice is recorded and fills no buffer") {
  Countdown countdown = laid_out();
  counted(countdown, 3);
  counted(countdown, 3);
  counted(countdown, 2);
  counted(countdown, 2);
  CHECK_EQ(countdown.repeated(), 3);
  CHECK((countdown.order() == Numbers{3, 2}));
  CHECK((counted(countdown, 1) == Numbers{1, 2}));
  countdown.begin();
  CHECK_EQ(countdown.repeated(), -1);
  CHECK(!countdown.is_counted(3));
}

TEST("a buffer records the time at which it became full") {
  Countdown countdown = laid_out();
  counted(countdown, 2);
  CHECK(countdown.first_ns() > 0);
  counted(countdown, 1);
  counted(countdown, 0);
  CHECK(countdown.full_ns()[1] >= countdown.first_ns());
  CHECK(countdown.full_ns()[0] >= countdown.full_ns()[1]);
  CHECK_EQ(countdown.full_ns()[2], 0);
}

TEST("a subscriber can end the countdown, and nothing is counted while it is paused") {
  Countdown countdown = laid_out();
  counted(countdown, 0);
  int n_calls = 0;
  CHECK(!countdown.count(1, [&](uint32_t) { return ++n_calls, false; }));
  CHECK_EQ(n_calls, 1);
  countdown.begin();
  countdown.paused = true;
  counted(countdown, 0);
  CHECK(countdown.order().empty());
}

}  // namespace
}  // namespace shoal::test
