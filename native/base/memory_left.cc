#include "base/memory_left.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace shoal {
namespace {

// The sum of the numbers after these words in a file of lines "word number".
size_t sum_in(const std::string& path, const std::vector<std::string_view>& words) {
  std::ifstream file(path);
  size_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string word;
    size_t number = 0;
    fields >> word >> number;
    if (std::find(words.begin(), words.end(), word) != words.end()) sum += number;
  }
  return sum;
}

// False if there is no such file, or a word ("max") instead of the number.
bool read_number(const std::string& path, size_t& out) {
  std::string word;
  std::ifstream(path) >> word;
  const auto read = std::from_chars(word.data(), word.data() + word.size(), out);
  return read.ec == std::errc() && read.ptr == word.data() + word.size();
}

// A hierarchy of cgroups that limits memory, as one version of the interface shows it.
struct Hierarchy {
  const char* limit;
  const char* used;
  std::vector<std::string_view> reclaimable;  // in memory.stat
  std::string mount_point;
  std::string inner;  // the process's own cgroup below that: "" or "/a/b"

  void ask(const std::string& root, MemoryLeft& least) const {
    for (std::string below = inner;; below.resize(below.rfind('/'))) {
      const std::string directory = mount_point + below;
      ask_one(root + directory + "/", directory, least);
      if (below.rfind('/') == std::string::npos) return;
    }
  }
  void ask_one(const std::string& files, const std::string& name, MemoryLeft& least) const {
    size_t most = 0, taken = 0;
    if (!read_number(files + limit, most) || !read_number(files + used, taken)) return;
    const size_t cache = sum_in(files + "memory.stat", reclaimable);
    taken -= std::min(taken, cache);
    const size_t left = most - std::min(most, taken);
    if (left >= least.n_bytes) return;
    least = {left, "the memory limit of " + name + " (" + std::to_string(most) + " B, " +
                       std::to_string(taken) + " B of them in use)"};
  }
};

Hierarchy version_2() {
  return {
      "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}, {}, {}};
}
Hierarchy version_1() {
  return {"memory.limit_in_bytes",
          "memory.usage_in_bytes",
          {"total_inactive_file", "total_active_file"},
          {},
          {}};
}

bool has_word(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string one; std::getline(words, one, ',');)
    if (one == word) return true;
  return false;
}

// The process's own cgroup, from lines "number:controllers:path"; version 2 has no controllers.
bool own_cgroup(const std::string& root, bool is_v2, std::string& path) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (is_v2 ? !controllers.empty() : !has_word(controllers, "memory")) continue;
    path = line.substr(second + 1);
    return true;
  }
  return false;
}

// The path of the cgroup `own` below a mount of the cgroups under `top`. A container may see only
// its own cgroup, mounted by itself, although its path is still the host's.
std::string path_below(const std::string& top, const std::string& own) {
  const std::string prefix = top == "/" ? "" : top;
  const bool inside = own.compare(0, prefix.size(), prefix) == 0 &&
                      (own.size() == prefix.size() || own[prefix.size()] == '/');
  const std::string below = inside ? own.substr(prefix.size()) : "";
  return below == "/" || below.find("/..") != std::string::npos ? "" : below;
}

// Lines "id parent device root mount_point options [optional ...] - type source super_options".
std::vector<Hierarchy> hierarchies(const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::string skipped, top, mount_point, type, super_options;
    std::istringstream fields(line);
    fields >> skipped >> skipped >> skipped >> top >> mount_point;
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream(line.substr(dash + 3)) >> type >> skipped >> super_options;
    const bool is_v2 = type == "cgroup2";
    if (!is_v2 && (type != "cgroup" || !has_word(super_options, "memory"))) continue;
    std::string own;
    if (!own_cgroup(root, is_v2, own)) continue;
    Hierarchy one = is_v2 ? version_2() : version_1();
    one.mount_point = mount_point;
    one.inner = path_below(top, own);
    found.push_back(std::move(one));
  }
  return found;
}

}  // namespace

MemoryLeft memory_left(const std::string& root) {
  MemoryLeft least{SIZE_MAX, "this machine"};
  const size_t kilobytes = sum_in(root + "/proc/meminfo", {"MemAvailable:"});
  if (kilobytes > 0) least.n_bytes = kilobytes * 1024;
  for (const Hierarchy& one : hierarchies(root)) one.ask(root, least);
  return least;
}

}  // namespace shoal
