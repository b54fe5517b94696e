// The memory left, from files as kernels and container engines write them.
#include <filesystem>
#include <fstream>
#include <string>

#include "base/memory_left.h"
#include "test/check.h"

namespace shoal::test {
namespace {

namespace fs = std::filesystem;

// A directory tree that replaces /.
struct Files {
  Files() {
    std::string name = fs::temp_directory_path() / "shoal-memory-XXXXXX";
    root = mkdtemp(name.data());
    put("/proc/meminfo", "MemTotal:  2000 kB\nMemFree:  100 kB\nMemAvailable:    1000 kB\n");
  }
  ~Files() { fs::remove_all(root); }
  void put(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  // One cgroup of version 2, with nothing to reclaim.
  void put_v2(const std::string& path, const std::string& limit, const std::string& used) const {
    put(path + "/memory.max", limit + "\n");
    put(path + "/memory.current", used + "\n");
  }
  std::string root;
};

constexpr const char* kMountOfV2 =
    "22 1 0:21 / /proc rw - proc proc rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

}  // namespace

TEST("without cgroups the memory left is the machine's available memory") {
  const Files files;
  CHECK_EQ(memory_left(files.root).n_bytes, 1'024'000u);
  CHECK_EQ(memory_left(files.root).where, "this machine");
}

TEST("without any readable limit nothing is limited") {
  CHECK_EQ(memory_left("/nonexistent").n_bytes, SIZE_MAX);
}

TEST("the tightest cgroup on the way up counts, and page cache counts as left") {
  const Files files;
  files.put("/proc/self/mountinfo", kMountOfV2);
  files.put("/proc/self/cgroup", "0::/jobs/mine/step\n");
  files.put_v2("/sys/fs/cgroup/jobs/mine/step", "max", "5000");
  files.put_v2("/sys/fs/cgroup/jobs/mine", "900000", "800000");
  files.put("/sys/fs/cgroup/jobs/mine/memory.stat",
            "anon 500000\nfile 300000\nactive_file 20000\ninactive_file 30000\nshmem 250000\n"
            "slab_reclaimable 1000\nslab_unreclaimable 7000\n");
  files.put_v2("/sys/fs/cgroup/jobs", "950000", "750000");
  CHECK_EQ(memory_left(files.root).n_bytes, 100'000u + 20'000u + 30'000u + 1'000u);
  CHECK_EQ(memory_left(files.root).where,
           "the memory limit of /sys/fs/cgroup/jobs/mine (900000 B, 749000 B of them in use)");
  files.put_v2("/sys/fs/cgroup/jobs", "950000", "951000");  // past its limit for a moment
  CHECK_EQ(memory_left(files.root).n_bytes, 0u);
  files.put_v2("/sys/fs/cgroup/jobs", "950000", "850000");
  CHECK_EQ(memory_left(files.root).n_bytes, 100'000u);
}

TEST("a cgroup that allows more than the machine has sets no limit") {
  const Files files;
  files.put("/proc/self/mountinfo", kMountOfV2);
  files.put("/proc/self/cgroup", "0::/\n");
  files.put_v2("/sys/fs/cgroup", "90000000000", "0");
  CHECK_EQ(memory_left(files.root).n_bytes, 1'024'000u);
  files.put_v2("/sys/fs/cgroup", "5000", "1000");  // a container's own root
  CHECK_EQ(memory_left(files.root).n_bytes, 4'000u);
}

TEST("version 1 cgroups are read too, beside a version 2 without memory") {
  const Files files;
  files.put("/proc/self/mountinfo",
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
            "36 31 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
  files.put("/proc/self/cgroup", "9:name=systemd:/\n8:pids:/\n4:memory:/job/7\n0::/\n");
  files.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  files.put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123456\n");
  files.put("/sys/fs/cgroup/memory/job/7/memory.limit_in_bytes", "70000\n");
  files.put("/sys/fs/cgroup/memory/job/7/memory.usage_in_bytes", "60000\n");
  files.put("/sys/fs/cgroup/memory/job/7/memory.stat",
            "cache 9000\ninactive_file 1\nactive_file 1\ntotal_inactive_file 3000\n"
            "total_active_file 2000\n");
  CHECK_EQ(memory_left(files.root).n_bytes, 15'000u);
  CHECK_EQ(memory_left(files.root).where,
           "the memory limit of /sys/fs/cgroup/memory/job/7 (70000 B, 55000 B of them in use)");
}

TEST("a container that sees its own cgroup under the host's path finds its limit") {
  const Files files;
  files.put("/proc/self/mountinfo",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,cpu,memory\n");
  files.put("/proc/self/cgroup", "4:cpu,memory:/docker/abc\n");
  files.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n");
  files.put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "20000\n");
  CHECK_EQ(memory_left(files.root).n_bytes, 30'000u);
  files.put("/proc/self/cgroup", "4:cpu,memory:/docker/abc/inner\n");
  files.put("/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "9000\n");
  files.put("/sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "2000\n");
  CHECK_EQ(memory_left(files.root).n_bytes, 7'000u);
  files.put("/proc/self/cgroup", "4:cpu,memory:/docker/abcdef\n");  // not below what is mounted
  CHECK_EQ(memory_left(files.root).n_bytes, 30'000u);
  files.put("/proc/self/cgroup", "4:cpu,memory:/../elsewhere\n");
  CHECK_EQ(memory_left(files.root).n_bytes, 30'000u);
}

}  // namespace shoal::test
