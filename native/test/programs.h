// The programs of all algorithms, and the meaning of collectives, from the file that the build lets
// tests/programs.py write from the schedules. Its docstring has the format.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/segments/program_builder.h"

namespace shoal::test {

// Reads one line from left to right. Throws on a malformed line.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : rest_(text) {}

  bool at_end() const { return rest_.empty(); }
  bool take(char wanted) {
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  char letter() {
    if (rest_.empty()) throw std::runtime_error("a line of the programs ends too early");
    const char first = rest_.front();
    rest_.remove_prefix(1);
    return first;
  }
  uint32_t number() {
    uint32_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc()) throw std::runtime_error("no number: " + std::string(rest_));
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    return value;
  }
  std::string_view word() { return upto(" "); }
  std::string_view named(std::string_view name) {  // the word after that one
    if (word() != name) throw std::runtime_error("a line without " + std::string(name));
    return word();
  }
  std::string_view upto(std::string_view separator) {
    const size_t end = std::min(rest_.find(separator), rest_.size());
    const std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + separator.size(), rest_.size()));
    return text;
  }
  std::vector<uint32_t> numbers() {
    std::vector<uint32_t> all;
    do all.push_back(number());
    while (take(','));
    return all;
  }

 private:
  std::string_view rest_;
};

// The blocks of a rank in each buffer: reads and writes of schedule/collectives.py.
enum class Blocks { kNone, kOwn, kAll, kAtRoot };

inline Blocks blocks_of(std::string_view name) {
  constexpr std::string_view kNames[] = {"NONE", "OWN", "ALL", "AT_ROOT"};
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::runtime_error("no blocks: " + std::string(name));
  return static_cast<Blocks>(found - std::begin(kNames));
}

// The meaning of a collective, whichever algorithm runs it.
struct Meaning {
  Blocks reads = Blocks::kNone, writes = Blocks::kNone;
  std::string root_word;     // in its description: "from" or "to", or empty
  bool folds = false;        // by any operation
  bool folds_again = false;  // by max alone: contributions may come twice

  bool in_place() const { return reads == Blocks::kNone && writes == Blocks::kNone; }
};

// The contents of a result's chunk: a chunk of the contributions of some ranks, folded.
struct Leaves {
  int first = 0, last = 0;
  uint32_t chunk = 0;
  bool finished = false;
};

inline void add_step(ProgramBuilder& steps, std::string_view text, bool finishes) {
  constexpr std::string_view kBufferLetters = "DIOS";
  Cursor cursor(text);
  const auto place = [&] {
    const size_t buffer = kBufferLetters.find(cursor.letter());
    if (buffer >= kBuffers) throw std::runtime_error("no buffer: " + std::string(text));
    return std::pair(static_cast<int>(buffer), cursor.number());
  };
  const char kind = cursor.letter();
  if (kind == 's' || kind == 'r' || kind == 'f') {
    const auto peer = static_cast<int>(cursor.number());
    const auto [buffer, chunk] = place();
    kind == 's' ? steps.send(peer, chunk, buffer) : steps.recv(peer, chunk, kind == 'f', buffer);
  } else if (kind == 'c' || kind == 'a') {
    const auto [buffer, chunk] = place();
    const auto [into_buffer, into] = place();
    steps.copy(chunk, into, buffer, into_buffer, kind == 'a');
  } else if (kind == 'e') {
    const auto [buffer, chunk] = place();
    if (finishes) steps.finish(chunk, buffer);
  } else {
    throw std::runtime_error("no step: " + std::string(text));
  }
  if (!cursor.at_end()) throw std::runtime_error("more than a step: " + std::string(text));
}

// One algorithm for one number of ranks: its requirements, and the steps of each rank.
//
// Threads: any.
class Recipe {
 public:
  std::string collective, algorithm;
  int size = 0, root = 0;
  std::string hosts;  // of every rank, "0,0,1"; empty if the algorithm does not ask
  uint32_t n_chunks = 0;
  bool takes_uneven = false;  // accepts chunks (or blocks) of any lengths

  // Of each chunk of a rank's result.
  std::vector<Leaves> leaves(int rank) const {
    std::vector<Leaves> all;
    for (Cursor words(part(rank, 0)); !words.at_end();) {
      Cursor value(words.word());
      Leaves& one = all.emplace_back();
      one.first = static_cast<int>(value.number());
      value.take('-');
      one.last = static_cast<int>(value.number());
      value.take('.');
      one.chunk = value.number();
      one.finished = value.take('!');
    }
    return all;
  }
  // For each scratch chunk of a rank, the chunk with the same length.
  std::vector<uint32_t> scratch(int rank) const {
    const std::string_view like = part(rank, 1);
    return like.empty() ? std::vector<uint32_t>() : Cursor(like).numbers();
  }
  // `finishes`: include the Finish steps, if there are any.
  std::shared_ptr<const Program> program(int rank, bool finishes) const {
    const std::lock_guard<std::mutex> lock(*making_);
    auto& made = made_[{rank, finishes}];
    if (made != nullptr) return made;
    ProgramBuilder steps(size);
    for (Cursor words(part(rank, 2)); !words.at_end();) add_step(steps, words.word(), finishes);
    return made = steps.done();
  }

 private:
  friend class Recipes;

  explicit Recipe(std::string_view title) {
    Cursor words(title);
    const auto number = [&](std::string_view name) { return Cursor(words.named(name)).number(); };
    collective = words.named("program");
    algorithm = words.word();
    size = static_cast<int>(number("size"));
    root = static_cast<int>(number("root"));
    hosts = words.named("hosts");
    if (hosts == "-") hosts.clear();
    n_chunks = number("chunks");
    takes_uneven = number("uneven") == 1;
  }
  std::string_view part(int rank, int number) const {
    Cursor parts(lines_[static_cast<size_t>(rank)]);
    while (number-- > 0) parts.upto(" | ");
    const std::string_view text = parts.upto(" | ");
    return text == "-" ? std::string_view() : text;
  }

  std::vector<std::string> lines_;
  std::unique_ptr<std::mutex> making_ = std::make_unique<std::mutex>();
  mutable std::map<std::pair<int, bool>, std::shared_ptr<const Program>> made_;
};

class Recipes {
 public:
  // The build's programs; SHOAL_PROGRAMS in the environment names another file.
  static const Recipes& all() {
    const char* const other = std::getenv("SHOAL_PROGRAMS");
    static const Recipes recipes(other == nullptr ? SHOAL_TEST_PROGRAMS : other);
    return recipes;
  }
  explicit Recipes(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("collective "))
        add_collective(line);
      else if (line.starts_with("program "))
        add(Recipe(line));
      else
        recipes_.back().lines_.push_back(std::move(line));
    }
  }

  // `hosts` empty: the first available layout.
  const Recipe& find(std::string_view collective, std::string_view algorithm, int size, int root,
                     std::string_view hosts) const {
    for (const Recipe* recipe : of_size(size)) {
      if (recipe->collective != collective || recipe->algorithm != algorithm) continue;
      if (recipe->root == root && (hosts.empty() || hosts == recipe->hosts)) return *recipe;
    }
    throw std::runtime_error("no program for " + std::string(collective) + " by " +
                             std::string(algorithm) + ", size " + std::to_string(size) + ", root " +
                             std::to_string(root) + ", hosts " + std::string(hosts) +
                             ": add it to tests/programs.py");
  }
  const std::vector<const Recipe*>& of_size(int size) const {
    const auto found = by_size_.find(size);
    if (found == by_size_.end())
      throw std::runtime_error("no programs for " + std::to_string(size) + " ranks");
    return found->second;
  }
  const std::deque<Recipe>& recipes() const { return recipes_; }
  const std::map<std::string, Meaning, std::less<>>& collectives() const { return collectives_; }
  const Meaning& meaning_of(std::string_view collective) const {
    const auto found = collectives_.find(collective);
    if (found == collectives_.end())
      throw std::runtime_error("no collective " + std::string(collective));
    return found->second;
  }

 private:
  void add_collective(std::string_view line) {
    Cursor words(line);
    Meaning& one = collectives_[std::string(words.named("collective"))];
    one.reads = blocks_of(words.named("reads"));
    one.writes = blocks_of(words.named("writes"));
    one.root_word = words.named("root");
    if (one.root_word == "-") one.root_word.clear();
    const std::string_view folds = words.named("folds");
    one.folds = folds == "any";
    one.folds_again = folds == "max";
  }
  void add(Recipe recipe) {
    const Recipe& added = recipes_.emplace_back(std::move(recipe));
    by_size_[added.size].push_back(&added);
  }

  std::map<std::string, Meaning, std::less<>> collectives_;
  std::deque<Recipe> recipes_;
  std::map<int, std::vector<const Recipe*>> by_size_;
};

}  // namespace shoal::test
