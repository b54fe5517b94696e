#include "bind/tables.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "engine/finished_calls.h"
#include "engine/granted_way.h"
#include "engine/mesh.h"
#include "engine/progress_thread.h"
#include "engine/served_calls.h"
#include "engine/state_reader.h"
#include "fold/codec.h"
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

}  // namespace

void bind_tables(nb::module_& m) {
  static_assert(ProgressThread::kMost == Header::kMaxPaths, "MOST_CONNECTIONS is said of both");
  m.attr("SEGMENT_BYTES") = kSegmentBytes;
  m.attr("STAGING_BYTES") = Engine::Options().staging_bytes;
  m.attr("SPIN_US") = Drivers::Options().spin_ns / 1000;
  m.attr("BACKSTOP_MS") = Drivers::Options().backstop_ns / 1'000'000;
  m.attr("RESUME_S") = PathMaker::Options().resume_ns / 1'000'000'000;
  m.attr("EAGER_BYTES") = Outbox::Sizes().small;
  m.attr("LOOK_AHEAD") = GrantedWay::kFirst;
  m.attr("MOST_CONNECTIONS") = Header::kMaxPaths;
  m.attr("FIRST_NAMED_KEY") = FinishedCalls::kFirstNamed;
  m.attr("LAST_FINISHED") = StateReader::kLastFinished;
  m.attr("MOST_SERVED") = ServedCalls::kMostPlans;
  m.def("dtypes", &dtypes);
  m.def("fold_ops", &fold_ops);
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
