// Measures the kernels of all codecs on one core: GB/s of float32, by instruction set.
//
//   make test-native
//   g++ -O2 -std=c++20 -Inative bench/codecs.cc build/native/libshoal_core.a -o build/codecs
//   build/codecs
//
// A run covers 256 KiB, like a segment. The best of many runs is printed, because other processes
// may use the machine.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "fold/kernels.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kElems = 65536;
constexpr size_t kFloatBytes = kElems * sizeof(float);

template <class Run>
double gb_per_second(Run run) {
  double best = 1e9;
  for (const auto end = Clock::now() + std::chrono::milliseconds(300); Clock::now() < end;) {
    const auto start = Clock::now();
    run();
    best = std::fmin(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return kFloatBytes / best / 1e9;
}

struct Named {
  const char* name;
  shoal::Codec codec;
  uint32_t keep;
};
constexpr Named kCodecs[] = {
    {"bf16", shoal::Codec::kBfloat16, 0},   {"fp16", shoal::Codec::kFloat16, 0},
    {"mxfp8", shoal::Codec::kMxFp8, 0},     {"mxint8", shoal::Codec::kMxInt8, 0},
    {"mxfp4", shoal::Codec::kMxFp4, 0},     {"topk:0.01:8", shoal::Codec::kTopK8, 41},
    {"topk:0.01:2", shoal::Codec::kTopK2, 41},
};

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> values(kElems), sums(kElems), data(kElems);
  for (float& value : values) value = normal(random);
  std::vector<std::byte> encoded(2 * kFloatBytes);
  auto* const from = reinterpret_cast<std::byte*>(values.data());
  auto* const into = reinterpret_cast<std::byte*>(sums.data());
  auto* const rounded = reinterpret_cast<std::byte*>(data.data());
  std::printf("%-9s %-12s %7s %7s %7s %7s %11s\n", "isa", "codec", "encode", "decode", "fold",
              "round", "stochastic");
  for (const shoal::Kernels* kernels : shoal::kernels_here())
    for (const Named& named : kCodecs) {
      shoal::Narrow codec = kernels->narrow[static_cast<size_t>(named.codec)];
      if (codec.encode == nullptr) continue;
      codec.keep = named.keep;
      const auto encode = [&] { codec.encode(codec, encoded.data(), from, kElems); };
      const auto decode = [&] { codec.decode(codec, into, encoded.data(), kElems); };
      const auto fold = [&] { codec.fold(codec, into, into, encoded.data(), kElems); };
      const auto again = [&] { std::memcpy(rounded, from, kFloatBytes); };
      const auto round = [&] { again(), codec.round(codec, rounded, kElems); };
      const auto stochastic = [&] {
        again(), codec.round_stochastic(codec, rounded, kElems, 1, 0);
      };
      std::printf("%-9s %-12s %7.2f", kernels->isa, named.name, gb_per_second(encode));
      std::printf(" %7.2f %7.2f", gb_per_second(decode), gb_per_second(fold));
      std::printf(" %7.2f %11.2f\n", gb_per_second(round), gb_per_second(stochastic));
    }
}
