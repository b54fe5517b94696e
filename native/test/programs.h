// The programs of all algorithms, as native/test/programs.txt has them: tests/programs.py writes
// it (`make programs`) from the schedules and tells its format.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/program.h"

namespace shoal::test {

// Reads one line from left to right. A line that is not as it should be throws.
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
    if (rest_.empty()) throw std::runtime_error("a line of programs.txt ends too early");
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

inline Step step_of(std::string_view text, uint32_t at, uint32_t& n_versions) {
  constexpr std::string_view kBufferLetters = "DIOS", kKinds = "srcefa";
  constexpr StepKind kKindOf[] = {StepKind::kSend,   StepKind::kRecv, StepKind::kCopy,
                                  StepKind::kFinish, StepKind::kRecv, StepKind::kCopy};
  Cursor cursor(text);
  Step step;
  const auto place = [&](uint8_t& buffer, uint32_t& chunk) {
    buffer = static_cast<uint8_t>(kBufferLetters.find(cursor.letter()));
    chunk = cursor.number();
    if (buffer >= kBuffers) throw std::runtime_error("no buffer: " + std::string(text));
  };
  const size_t kind = kKinds.find(cursor.letter());
  if (kind == std::string_view::npos) throw std::runtime_error("no step: " + std::string(text));
  step.kind = kKindOf[kind];
  step.fold = kind > 3;
  if (step.kind == StepKind::kSend || step.kind == StepKind::kRecv)
    step.peer = static_cast<int32_t>(cursor.number());
  place(step.buffer, step.chunk);
  if (step.kind == StepKind::kCopy) place(step.into_buffer, step.into);
  if (step.kind == StepKind::kSend)
    step.version = cursor.take('v') ? cursor.number() : n_versions++;
  if (cursor.take('<'))
    for (const uint32_t back : cursor.numbers()) step.waits_for.push_back(at - back);
  if (!cursor.at_end()) throw std::runtime_error("more than a step: " + std::string(text));
  return step;
}

// One algorithm over so many ranks: what it needs, and the steps of each rank.
//
// Threads: any.
class Recipe {
 public:
  std::string collective, algorithm;
  int size = 0, root = 0;
  std::string hosts;  // of every rank, "0,0,1"; empty where the algorithm does not ask
  uint32_t n_chunks = 0;
  bool takes_uneven = false;  // chunks (or blocks) of any lengths will do

  // For each scratch chunk of a rank, the chunk that is as long.
  std::vector<uint32_t> scratch(int rank) const {
    Cursor parts(lines_[static_cast<size_t>(rank)]);
    const std::string_view like = parts.upto(" | ");
    return like == "-" ? std::vector<uint32_t>() : Cursor(like).numbers();
  }
  // `divides`: with the Finish steps, where there are any.
  std::shared_ptr<const Program> program(int rank, bool divides) const {
    const std::lock_guard<std::mutex> lock(*making_);
    auto& made = made_[{rank, divides}];
    if (made == nullptr) made = parsed(lines_[static_cast<size_t>(rank)], divides);
    return made;
  }

 private:
  friend class Recipes;

  explicit Recipe(std::string_view title) {
    Cursor words(title);
    const auto named = [&](std::string_view name) {
      if (words.word() != name)
        throw std::runtime_error(std::string(name) + " is missing: " + std::string(title));
      return words.word();
    };
    const auto number = [&](std::string_view name) { return Cursor(named(name)).number(); };
    collective = named("program");
    algorithm = words.word();
    size = static_cast<int>(number("size"));
    root = static_cast<int>(number("root"));
    hosts = named("hosts");
    if (hosts == "-") hosts.clear();
    n_chunks = number("chunks");
    takes_uneven = number("uneven") == 1;
  }
  std::shared_ptr<const Program> parsed(std::string_view line, bool divides) const {
    Cursor parts(line);
    parts.upto(" | ");
    std::string_view steps = parts.upto(" | ");
    if (divides && !parts.at_end()) steps = parts.upto(" | ");
    auto program = std::make_shared<Program>();
    uint32_t n_versions = 0;
    for (Cursor words(steps == "-" ? "" : steps); !words.at_end();) {
      const auto at = static_cast<uint32_t>(program->steps.size());
      program->steps.push_back(step_of(words.word(), at, n_versions));
    }
    program->index(size);
    return program;
  }

  std::vector<std::string> lines_;
  std::unique_ptr<std::mutex> making_ = std::make_unique<std::mutex>();
  mutable std::map<std::pair<int, bool>, std::shared_ptr<const Program>> made_;
};

class Recipes {
 public:
  // Those of programs.txt; SHOAL_PROGRAMS in the environment names another file.
  static const Recipes& all() {
    const char* const other = std::getenv("SHOAL_PROGRAMS");
    static const Recipes recipes(other == nullptr ? SHOAL_TEST_PROGRAMS : other);
    return recipes;
  }
  explicit Recipes(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path + ": run `make programs`");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("program "))
        recipes_.back().lines_.push_back(std::move(line));
      else
        add(Recipe(line));
    }
  }

  // `hosts` empty: the first layout there is.
  const Recipe& find(std::string_view collective, std::string_view algorithm, int size, int root,
                     std::string_view hosts) const {
    for (const Recipe* recipe : of_size(size)) {
      if (recipe->collective != collective || recipe->algorithm != algorithm) continue;
      if (recipe->root == root && (hosts.empty() || hosts == recipe->hosts)) return *recipe;
    }
    throw std::runtime_error("no program for " + std::string(collective) + " by " +
                             std::string(algorithm) + ", size " + std::to_string(size) + ", root " +
                             std::to_string(root) + ", hosts " + std::string(hosts) +
                             ": add it to tests/programs.py and run `make programs`");
  }
  const std::vector<const Recipe*>& of_size(int size) const {
    const auto found = by_size_.find(size);
    if (found == by_size_.end())
      throw std::runtime_error("no programs for " + std::to_string(size) + " ranks");
    return found->second;
  }
  const std::deque<Recipe>& recipes() const { return recipes_; }

 private:
  void add(Recipe recipe) {
    const Recipe& added = recipes_.emplace_back(std::move(recipe));
    by_size_[added.size].push_back(&added);
  }

  std::deque<Recipe> recipes_;
  std::map<int, std::vector<const Recipe*>> by_size_;
};

}  // namespace shoal::test
