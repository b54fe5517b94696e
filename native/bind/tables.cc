#include "bind/tables.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/segments/finished_calls.h"
#include "engine/segments/granted_way.h"
#include "engine/segments/served_calls.h"
#include "engine/shell/mesh.h"
#include "engine/shell/progress_thread.h"
#include "engine/shell/state_reader.h"
#include "fold/codec.h"
#include "transport/frame_rules.h"
#include "transport/outbox.h"
#include "transport/path_maker.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// By their numbers.
std::vector<std::pair<std::string, size_t>> dtypes() {
  std::vector<std::pair<std::string, size_t>> all;
  for (size_t number = 0; number < kDTypes; ++number)
    all.emplace_back(name_of(DType(number)), size_of(DType(number)));
  return all;
}

std::vector<std::string> fold_ops() {
  std::vector<std::string> all;
  for (size_t number = 0; number < kFoldOps; ++number) all.emplace_back(name_of(FoldOp(number)));
  return all;
}

bool can_fold(int dtype, int op) {
  return is_dtype(dtype) && is_fold_op(op) &&
         fold_function(static_cast<DType>(dtype), static_cast<FoldOp>(op)) != nullptr;
}

std::optional<Narrow> narrow_of(int codec, int dtype, int op, uint32_t keep = 0) {
  if (!is_codec(codec) || !is_dtype(dtype) || !is_fold_op(op)) return std::nullopt;
  return narrow_for(static_cast<Codec>(codec), static_cast<DType>(dtype), static_cast<FoldOp>(op),
                    keep);
}

bool can_encode(int codec, int dtype, int op) { return narrow_of(codec, dtype, op).has_value(); }

size_t encoded_bytes(int codec, uint32_t keep, size_t n_elems) {
  const auto narrow = narrow_of(codec, static_cast<int>(DType::kFloat32), 0, keep);
  return narrow ? narrow->bytes_of(*narrow, n_elems) : 0;
}

void round_to(int codec, uint32_t keep, int dtype, uintptr_t address, size_t n_elems, uint64_t seed,
              uint64_t first) {
  const auto narrow = narrow_of(codec, dtype, static_cast<int>(FoldOp::kSum), keep);
  if (!narrow) throw std::invalid_argument("this codec does not support this dtype");
  auto* const data = reinterpret_cast<std::byte*>(address);
  if (seed == 0)
    narrow->round(*narrow, data, n_elems);
  else
    narrow->round_stochastic(*narrow, data, n_elems, seed, first);
}

}  // namespace

void bind_tables(nb::module_& m) {
  static_assert(ProgressThread::kMost == Header::kMaxPaths, "MOST_CONNECTIONS limits both");
  m.attr("SEGMENT_BYTES") = kSegmentBytes;
  m.attr("STAGING_BYTES") = Engine::Options().staging_bytes;
  m.attr("SPIN_US") = Drivers::Options().spin_ns / 1000;
  m.attr("BACKSTOP_MS") = Drivers::Options().backstop_ns / 1'000'000;
  m.attr("RESUME_S") = PathMaker::Options().resume_ns / 1'000'000'000;
  m.attr("DEAD_S") = Engine::Options().dead_ns / 1'000'000'000;
  m.attr("EAGER_BYTES") = Outbox::Sizes().small;
  m.attr("LOOK_AHEAD") = GrantedWay::kFirst;
  m.attr("MOST_CONNECTIONS") = Header::kMaxPaths;
  m.attr("FIRST_NAMED_KEY") = FinishedCalls::kFirstNamed;
  m.attr("CALLS_REMEMBERED") = FinishedCalls::kKept;
  m.attr("LAST_FINISHED") = StateReader::kLastFinished;
  m.attr("MOST_SERVED") = ServedCalls::kMostPlans;
  m.def("dtypes", &dtypes);
  m.def("fold_ops", &fold_ops);
  m.def("can_fold", &can_fold);
  m.def("can_encode", &can_encode);
  m.def("encoded_bytes", &encoded_bytes);
  m.def("round_to", &round_to);
  m.def("frame_rules", [] {
    std::vector<
        std::tuple<int, std::string, uint8_t, uint16_t, std::string, std::string, std::string>>
        rows;
    for (const FrameRule& rule : frame_rules())
      rows.emplace_back(static_cast<int>(rule.type), rule.name, rule.over, rule.flags, rule.when,
                        rule.meaning, rule.follows);
    return rows;
  });
  m.attr("N_CODECS") = kCodecs;
  m.attr("N_BUFFERS") = kBuffers;
  nb::enum_<Fault>(m, "Fault")
      .value("NONE", Fault::kNone)
      .value("PEER_LOST", Fault::kPeerLost)
      .value("TIMED_OUT", Fault::kTimedOut)
      .value("MISMATCH", Fault::kMismatch)
      .value("CLOSED", Fault::kClosed)
      .value("RESOURCE", Fault::kResource)
      .value("INTERNAL", Fault::kInternal);
}

}  // namespace shoal
