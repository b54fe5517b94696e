// A small test harness: TEST("a sentence") { CHECK(cond); CHECK_EQ(a, b); }, one program per file.
//
// The file that includes this is the test program; main() is below. An argument keeps only the
// tests whose sentence contains it. Exit status 1 if any test failed, or if the filter met no test.
// Threads: CHECK may be called from any thread; a failed check lets the test continue.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace shoal::test {

struct Test {
  const char* sentence;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int>& failures_of_this_test() {
  static std::atomic<int> n{0};
  return n;
}

struct Registration {
  Registration(const char* sentence, void (*body)()) { tests().push_back({sentence, body}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  // A broken kernel fails thousands of elements; the first few are enough.
  constexpr int kShown = 10;
  static std::mutex printing;
  const int earlier = failures_of_this_test().fetch_add(1);
  const std::lock_guard<std::mutex> lock(printing);
  if (earlier < kShown) std::printf("%s:%d: %s\n", file, line, what.c_str());
  if (earlier == kShown) std::printf("%s:%d: ... more\n", file, line);
}

template <class T>
std::string shown(const T& value) {
  std::ostringstream text;
  if constexpr (requires { text << value; }) {
    if constexpr (sizeof(T) == 1 && requires { +value; }) {
      text << +value;  // a number, not a character
    } else {
      text << value;
    }
  } else if constexpr (requires { static_cast<long long>(value); }) {
    text << static_cast<long long>(value);  // enum class
  } else {
    text << "(a value without <<)";
  }
  return text.str();
}

template <class T>
inline constexpr bool kCounts = std::is_integral_v<T> && !std::is_same_v<T, bool> &&
                                !std::is_same_v<T, char>;  // accepted by std::cmp_equal

// By value for integers, so that a size may be compared with a plain 3.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (kCounts<A> && kCounts<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class A, class B>
void check_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (equal(a, b)) return;
  fail(file, line, std::string("CHECK_EQ(") + text + "): " + shown(a) + " != " + shown(b));
}

inline bool passes(const Test& test) {
  failures_of_this_test() = 0;
  try {
    test.body();
  } catch (const std::exception& thrown) {
    fail(test.sentence, 0, std::string("threw ") + thrown.what());
  } catch (...) {
    fail(test.sentence, 0, "threw something that is no std::exception");
  }
  if (failures_of_this_test() == 0) return true;
  std::printf("FAILED: %s (%d checks)\n", test.sentence, failures_of_this_test().load());
  return false;
}

inline int run_all(const char* filter) {
  int n_passed = 0;
  int n_failed = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.sentence, filter) == nullptr) continue;
    ++(passes(test) ? n_passed : n_failed);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", n_passed, n_failed);
  return n_failed == 0 && n_passed > 0 ? 0 : 1;
}

}  // namespace shoal::test

#define SHOAL_JOIN2(a, b) a##b
#define SHOAL_JOIN(a, b) SHOAL_JOIN2(a, b)

#define TEST(sentence)                                                               \
  static void SHOAL_JOIN(test_body_, __LINE__)();                                    \
  static const ::shoal::test::Registration SHOAL_JOIN(test_registration_, __LINE__)( \
      sentence, SHOAL_JOIN(test_body_, __LINE__));                                   \
  static void SHOAL_JOIN(test_body_, __LINE__)()

#define CHECK(...)                                                                          \
  do {                                                                                      \
    if (!(__VA_ARGS__)) ::shoal::test::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"); \
  } while (false)

#define CHECK_EQ(a, b) ::shoal::test::check_eq((a), (b), #a ", " #b, __FILE__, __LINE__)

int main(int n_args, char** args) { return ::shoal::test::run_all(n_args > 1 ? args[1] : ""); }
