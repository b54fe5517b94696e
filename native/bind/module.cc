// The Python bindings of the native core. No logic: they convert arguments, release the GIL while
// they wait, and turn error values into tuples that src/shoal/engine.py raises.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/shared_memory.h"
#include "base/signal_note.h"
#include "base/stream_copy.h"
#include "bind/countdown.h"
#include "bind/endpoint.h"
#include "bind/handshake.h"
#include "bind/tables.h"
#include "bind/value.h"
#include "engine/segments/program_builder.h"
#include "engine/shell/mesh.h"
#include "engine/shell/progress_thread.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// Fault, mesh rank to blame or -1, what happened, during which call.
using ErrorTuple = std::tuple<Fault, int, std::string, std::string>;

ErrorTuple tuple_of(const Error& error) {
  return {error.fault, error.peer, error.text, error.doing};
}

// True if nanobind passes a T to native code as the shared pointer that made it. Otherwise it would
// pass one that owns a reference to the Python object. Native threads drop such pointers, for which
// they would take the GIL. A finalizing interpreter ends a thread that asks for it, here in a
// destructor, which aborts the process.
template <class T>
concept FreeOfPython = requires(T& t) { t.weak_from_this(); };
static_assert(FreeOfPython<Program> && FreeOfPython<Plan> && FreeOfPython<Arena> &&
              FreeOfPython<Mesh>);

// Set-up errors have no call to report them: they are raised at once. engine.py handles both.
void raise_if(const Error& error) {
  if (!error) return;
  if (error.fault == Fault::kResource) {
    PyErr_SetString(PyExc_MemoryError, error.text.c_str());
    throw nb::python_error();
  }
  throw std::runtime_error(error.text);
}

int64_t ns_of(double seconds) {
  // A century stands for "for ever"; beyond it the nanoseconds would not fit.
  return static_cast<int64_t>(std::clamp(seconds, 0.0, 3.2e9) * 1e9);
}

int64_t after(double seconds) { return now_ns() + ns_of(seconds); }

void check(const ProgramBuilder& builder, int buffer, int peer = 0) {
  if (buffer < 0 || buffer >= kBuffers || peer < 0 || peer >= builder.group_size())
    throw std::invalid_argument("a step of this program is out of range");
}

ProgramBuilder make_builder(int group_size) {
  if (group_size < 1) throw std::invalid_argument("a group has at least one rank");
  return ProgramBuilder(group_size);
}

using LayoutTuple = std::pair<std::vector<uint64_t>, std::vector<uint64_t>>;

std::shared_ptr<Plan> make_plan(std::shared_ptr<Program> program,
                                const std::vector<LayoutTuple>& layouts, int dtype, int op,
                                uint32_t divisor, int codec, const std::string& descriptor,
                                const std::string& agreement, bool by_pair, uint32_t n_lanes,
                                uint32_t n_workers, uint32_t segment_bytes, bool rounds_own,
                                uint32_t keep, std::vector<uint64_t> scratch_first) {
  if (layouts.size() != kBuffers || !is_dtype(dtype) || !is_fold_op(op) || !is_codec(codec))
    throw std::invalid_argument("a plan needs four layouts, a dtype, an operation and a codec");
  auto plan = std::make_shared<Plan>();
  plan->program = std::move(program);
  for (int buffer = 0; buffer < kBuffers; ++buffer)
    plan->layout[buffer] = {layouts[buffer].first, layouts[buffer].second};
  plan->dtype = static_cast<DType>(dtype);
  plan->fold = fold_function(plan->dtype, static_cast<FoldOp>(op));
  plan->divisor = divisor;
  plan->narrow = narrow_for(static_cast<Codec>(codec), plan->dtype, static_cast<FoldOp>(op), keep);
  if (!plan->narrow && static_cast<Codec>(codec) != Codec::kIdentity)
    throw std::invalid_argument("this codec does not support this dtype and operation");
  plan->rounds_own = rounds_own;
  plan->scratch_first = std::move(scratch_first);
  plan->segment_bytes = segment_bytes;
  plan->descriptor = descriptor;
  plan->descriptor_hash = descriptor_hash_of(agreement);
  plan->by_pair = by_pair;
  plan->n_lanes = n_lanes;
  plan->n_workers = n_workers;
  if (const std::string why = plan->flaw(); !why.empty()) throw std::invalid_argument(why);
  plan->index();
  return plan;
}

// The number of threads in native code without the GIL. They take it back in a destructor, where a
// thread must not end. A finalizing interpreter ends threads that ask for the GIL, so this must be
// zero by then.
std::atomic<int> n_waiting{0};

// Releases the GIL for its lifetime.
class Released {
  struct Counted {
    Counted() { n_waiting++; }
    ~Counted() { n_waiting--; }
  };
  Counted counted_;  // declared first: until the interpreter is taken back
  nb::gil_scoped_release release_;
};

// Python's handle of a call. Python may keep it for long, for example in the frames of a stored
// error. So it does not keep the mesh alive, whose descriptors and memory go with its world; all
// its calls have finished by then.
struct CallHandle {
  std::weak_ptr<Mesh> mesh;
  std::shared_ptr<Call> call;

  bool finished() const { return call->is_over(); }
  bool abandoned() const {
    const auto held = mesh.lock();
    return held == nullptr || held->forsaken();
  }
  bool done() const { return finished() || abandoned(); }

  // True when finished. Releases the GIL, and handles signals now and then.
  bool wait(double timeout_s) {
    if (done()) return true;
    const int64_t deadline = now_ns() + ns_of(timeout_s);
    for (;;) {
      bool ended;
      {
        Released released;
        const auto held = mesh.lock();
        ended = held == nullptr || held->wait(*call, deadline - now_ns());
      }
      if (ended) return true;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (now_ns() >= deadline) return done();
    }
  }

  // The group rank from which a finished receive's message came; -1 before that.
  int source() const { return done() ? call->source : -1; }

  bool succeeded() const { return finished() && !call->outcome(); }

  int64_t finished_ns() const { return finished() ? call->over_ns() : 0; }

  // The chunks that a server reduces, each with a bitmap of the segments that hold the result.
  std::vector<std::pair<uint32_t, nb::bytes>> landed() const {
    if (!finished()) throw std::runtime_error(call->doing() + " is not over yet");
    std::vector<std::pair<uint32_t, nb::bytes>> all;
    for (const auto& [chunk, bits] : landed_of(*call))
      all.emplace_back(chunk, nb::bytes(bits.data(), bits.size()));
    return all;
  }

  ErrorTuple error() const {
    if (finished()) return tuple_of(call->outcome());
    if (!abandoned()) return {Fault::kNone, -1, "", ""};
    return {Fault::kClosed, -1, "a forked child cannot wait for its parent's calls", call->doing()};
  }
};

// Keeps a dropped group alive: another thread may be about to make a call on it.
struct GroupHandle {
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Group> group;
  bool dropped = false;

  // A call whose plan has more lanes than there are channels would never end.
  void check(const Plan& plan) const {
    if (plan.n_lanes != 1 && plan.n_lanes != static_cast<uint32_t>(mesh->n_channels()))
      throw std::invalid_argument("a call of " + std::to_string(plan.n_lanes) + " lanes over " +
                                  std::to_string(mesh->n_channels()) + " channels");
  }

  template <class What>
  CallHandle post(const What& what) {
    Released released;
    return {mesh, mesh->post(*group, what)};
  }

  CallHandle post_call(std::shared_ptr<Plan> plan, uint64_t key,
                       const std::vector<std::vector<uintptr_t>>& memory, double timeout_s,
                       bool background, Subject subject) {
    check(*plan);
    Memory pointers(memory.size());
    for (size_t buffer = 0; buffer < memory.size(); ++buffer)
      for (const uintptr_t address : memory[buffer])
        pointers[buffer].push_back(reinterpret_cast<std::byte*>(address));
    return post(
        Posting{std::move(plan), key, std::move(pointers), after(timeout_s), background, subject});
  }

  // The same for calls on one buffer in place: small messages spend their time here.
  CallHandle post_in_place(std::shared_ptr<Plan> plan, uint64_t key, uintptr_t address,
                           double timeout_s, bool background, Subject subject) {
    check(*plan);
    auto* const base = reinterpret_cast<std::byte*>(address);
    return post(Posting{std::move(plan), key, {{base}}, after(timeout_s), background, subject});
  }

  // A send to `peer` or a receive from it; -1: from any source.
  CallHandle post_message(std::shared_ptr<Plan> plan, bool sends, int peer, int64_t tag,
                          uintptr_t address, double timeout_s, bool background) {
    const auto size = static_cast<int>(group->members.size());
    if (peer < (sends ? 0 : -1) || peer >= size)
      throw std::invalid_argument("a message's peer is out of range");
    auto* const data = reinterpret_cast<std::byte*>(address);
    return post(Message{std::move(plan), sends, peer, tag, data, after(timeout_s), background});
  }

  void notify(int fd) {
    bool is_hung;
    {
      Released released;
      is_hung = mesh->notify(*group, fd);
    }
    if (!is_hung) raise_if({Fault::kResource, -1, "no file descriptor is left"});
  }

  bool has_message(int peer, int64_t tag) {
    if (peer < 0 || peer >= static_cast<int>(group->members.size()))
      throw std::invalid_argument("a message's peer is out of range");
    Released released;
    return mesh->has_message(*group, peer, tag);
  }

  void serve(std::shared_ptr<Plan> plan) {
    check(*plan);
    if (const std::string why = ServedCalls::refusal(*group, *plan); !why.empty())
      throw std::invalid_argument(why);
    Released released;
    mesh->serve(*group, std::move(plan));
  }

  void abort(const std::string& why) {
    Released released;
    mesh->abort_group(*group, why);
  }
  // Fail the group. `fault` is the kind of error raised on all ranks, `why` its text.
  void fail(Fault fault, const std::string& why) {
    Released released;
    mesh->fail_group(*group, fault, why);
  }
  void drop() {
    if (std::exchange(dropped, true)) return;
    Released released;
    mesh->drop_group(*group);
  }
  bool drop_unheld() {
    Released released;
    dropped = dropped || mesh->drop_unheld_group(*group);
    return dropped;
  }
  ErrorTuple error() {
    Released released;
    return tuple_of(mesh->abort_of(*group));
  }
  nb::object take_state_at_deadline() {
    std::shared_ptr<const Value> state;
    {
      Released released;
      state = mesh->take_state_at_deadline(*group);
    }
    return state == nullptr ? nb::object(nb::none()) : python_of(*state);
  }
};

// The rank, whether it is on this host, and if not, the number of paths per channel and its
// listening addresses.
using PeerTuple = std::tuple<int, bool, int, std::vector<std::pair<std::string, int>>>;

PathMaker::Peer known_peer(const PeerTuple& tuple) {
  const auto& [rank, is_local, n_paths, listens_at] = tuple;
  const int most = static_cast<int>(Header::kMaxPaths);
  if (n_paths < 1 || n_paths > most || listens_at.empty())
    throw std::invalid_argument("a peer needs 1 to " + std::to_string(most) +
                                " paths for each channel, and an address");
  PathMaker::Peer peer{rank, static_cast<size_t>(n_paths), {}};
  for (const auto& [host, port] : listens_at)
    peer.listens_at.push_back(Address::of(host, static_cast<uint16_t>(port)));
  return peer;
}

std::shared_ptr<Mesh> make_mesh(int rank, std::vector<std::string> names, uint64_t epoch,
                                const nb::bytes& job_key, std::shared_ptr<Arena> arena,
                                const std::vector<PeerTuple>& peers, int n_channels,
                                uint64_t staging_bytes, double spin_us, double backstop_s,
                                const std::vector<int>& listeners, double resume_s, double dead_s) {
  if (n_channels < 1 || n_channels > ProgressThread::kMost)
    throw std::invalid_argument("there are 1 to " + std::to_string(ProgressThread::kMost) +
                                " channels");
  std::vector<PeerPlace> places;
  PathMaker::Options making;
  making.epoch = epoch;
  making.rank = rank;
  making.listeners = listeners;
  making.resume_ns = ns_of(resume_s);
  making.n_channels = static_cast<size_t>(n_channels);
  for (const PeerTuple& peer : peers) {
    const auto& [other, is_local, n_paths, listens_at] = peer;
    if (!is_local) making.peers.push_back(known_peer(peer));
    places.push_back({other, is_local, static_cast<size_t>(n_paths)});
  }
  Mesh::Options options;
  options.n_channels = n_channels;
  options.engine.staging_bytes = staging_bytes;
  options.engine.take_for_dead_after(ns_of(dead_s));
  options.spin_ns = static_cast<int64_t>(spin_us * 1e3);
  options.backstop_ns = ns_of(backstop_s);
  std::shared_ptr<Mesh> mesh;
  const Bytes key = bytes_of(job_key);
  making.job_key.assign(key.begin(), key.end());
  std::unique_ptr<PathMaker> paths;
  Released released;
  Error error;
  if (!making.peers.empty() || !listeners.empty())
    error = PathMaker::create(std::move(making), paths);
  if (!error)
    error = Mesh::create(rank, std::move(names), epoch, key, std::move(arena), places, options,
                         mesh, std::move(paths));
  if (error) {
    nb::gil_scoped_acquire acquire;
    raise_if(error);
  }
  return mesh;
}

}  // namespace
}  // namespace shoal

NB_MODULE(_native, m) {
  using namespace shoal;
  m.doc() = "shoal's native core; import shoal.engine instead";
  // torch keeps futures and process groups until exit; leaks through them are not reported
  // here.
  nb::set_leak_warnings(false);

  bind_handshake(m);
  bind_endpoint(m);
  bind_tables(m);
  bind_countdown(m);
  nb::class_<Program>(m, "Program").def_prop_ro("waits_for", [](const Program& program) {
    std::vector<std::vector<uint32_t>> all;
    for (const Step& step : program.steps) all.push_back(step.waits_for);
    return all;
  });
  nb::class_<ProgramBuilder>(m, "ProgramBuilder")
      .def_static("of", &make_builder)
      .def("send",
           [](ProgramBuilder& self, int peer, uint32_t chunk, int buffer) {
             check(self, buffer, peer);
             self.send(peer, chunk, buffer);
           })
      .def("recv",
           [](ProgramBuilder& self, int peer, uint32_t chunk, bool fold, int buffer) {
             check(self, buffer, peer);
             self.recv(peer, chunk, fold, buffer);
           })
      .def("copy",
           [](ProgramBuilder& self, uint32_t chunk, uint32_t into, int buffer, int into_buffer,
              bool fold) {
             check(self, buffer);
             check(self, into_buffer);
             self.copy(chunk, into, buffer, into_buffer, fold);
           })
      .def("finish",
           [](ProgramBuilder& self, uint32_t chunk, int buffer) {
             check(self, buffer);
             self.finish(chunk, buffer);
           })
      .def("done", &ProgramBuilder::done);
  nb::class_<Plan>(m, "Plan")
      .def_static("make", &make_plan, nb::arg("program"), nb::arg("layouts"), nb::arg("dtype"),
                  nb::arg("op"), nb::arg("divisor"), nb::arg("codec"), nb::arg("descriptor"),
                  nb::arg("agreement"), nb::arg("by_pair"), nb::arg("n_lanes") = 1,
                  nb::arg("n_workers") = 0, nb::arg("segment_bytes") = kSegmentBytes,
                  nb::arg("rounds_own") = false, nb::arg("keep") = 0,
                  nb::arg("scratch_first") = std::vector<uint64_t>())
      .def_prop_ro("descriptor", [](const Plan& plan) { return plan.descriptor; })
      .def_prop_ro("segment_bytes", [](const Plan& plan) { return plan.segment_bytes; })
      .def_rw("tensor_bytes", &Plan::tensor_bytes);

  nb::class_<Arena>(m, "Arena")
      .def_static("create",
                  [](int n_local) {
                    auto arena = std::make_shared<Arena>();
                    raise_if(Arena::create(n_local, *arena));
                    return arena;
                  })
      .def_static("enter",
                  [](int memory_fd, int n_local, int local) {
                    auto arena = std::make_shared<Arena>();
                    raise_if(Arena::enter(memory_fd, n_local, local, *arena));
                    return arena;
                  })
      .def_prop_ro("memory_fd", &Arena::memory_fd);

  nb::class_<CallHandle>(m, "Call")
      .def("wait", &CallHandle::wait, nb::arg("timeout_s"))
      .def("done", &CallHandle::done)
      .def("source", &CallHandle::source)
      .def("succeeded", &CallHandle::succeeded)
      .def_prop_ro("finished_ns", &CallHandle::finished_ns)
      .def("landed", &CallHandle::landed)
      .def("error", &CallHandle::error);
  nb::class_<GroupHandle>(m, "Group")
      .def("post", &GroupHandle::post_call)
      .def("post_in_place", &GroupHandle::post_in_place)
      .def("post_message", &GroupHandle::post_message)
      .def("notify", &GroupHandle::notify)
      .def("has_message", &GroupHandle::has_message)
      .def("serve", &GroupHandle::serve)
      .def("abort", &GroupHandle::abort)
      .def("fail", &GroupHandle::fail)
      .def("drop", &GroupHandle::drop)
      .def("drop_unheld", &GroupHandle::drop_unheld)
      .def("error", &GroupHandle::error)
      .def("take_state_at_deadline", &GroupHandle::take_state_at_deadline)
      .def_prop_ro("id", [](const GroupHandle& handle) { return handle.group->id; });
  nb::class_<Mesh>(m, "Mesh")
      .def_static("create", &make_mesh, nb::arg("rank"), nb::arg("names"), nb::arg("epoch"),
                  nb::arg("job_key"), nb::arg("arena"), nb::arg("peers"), nb::arg("n_channels"),
                  nb::arg("staging_bytes"), nb::arg("spin_us"), nb::arg("backstop_s"),
                  nb::arg("listeners"), nb::arg("resume_s"), nb::arg("dead_s"))
      .def("group",
           [](std::shared_ptr<Mesh> mesh, uint64_t id, std::vector<int> members) {
             std::shared_ptr<Group> group;
             {
               Released released;
               group = mesh->add_group(id, std::move(members)).shared_from_this();
             }
             return GroupHandle{std::move(mesh), std::move(group)};
           })
      .def("bound_out", &Mesh::bound_out, nb::arg("n_bytes"), nb::call_guard<Released>())
      .def("close", &Mesh::close, nb::call_guard<Released>())
      .def(
          "close_after", [](Mesh& mesh, double seconds) { mesh.close_after(ns_of(seconds)); },
          nb::arg("seconds"))
      .def("wait_finished",
           [](Mesh& mesh, int64_t seen, double timeout_s) {
             int64_t n_finished;
             {
               Released released;
               n_finished = mesh.wait_finished(seen, ns_of(timeout_s));
             }
             if (PyErr_CheckSignals() != 0) throw nb::python_error();
             return n_finished;
           })
      .def("staging_peak", &Mesh::staging_peak, nb::call_guard<Released>())
      .def("state", [](Mesh& mesh, double patience_s) {
        std::shared_ptr<const Value> state;
        {
          Released released;
          state = mesh.state(ns_of(patience_s));
        }
        return state == nullptr ? nb::object(nb::none()) : python_of(*state);
      });

  m.def("address_of", [](nb::handle view) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(view.ptr(), &buffer, PyBUF_SIMPLE | PyBUF_C_CONTIGUOUS) != 0)
      throw nb::python_error();
    const auto address = reinterpret_cast<uintptr_t>(buffer.buf);
    PyBuffer_Release(&buffer);
    return address;
  });
  m.def("allocate", [](uint64_t n_bytes) {
    Regions::Region region;
    Error error;
    {
      Released released;  // the kernel clears all of it
      error = Regions::of_process().allocate(n_bytes, region);
    }
    raise_if(error);
    return reinterpret_cast<uintptr_t>(region.data);
  });
  m.def("release", [](uintptr_t address) {
    Regions::of_process().release(reinterpret_cast<const std::byte*>(address));
  });
  m.def("stream_copy", [](uintptr_t to, uintptr_t from, uint64_t n_bytes) {
    const Released released;
    stream_copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                n_bytes);
  });
  m.def("fold_isa", &fold_isa);
  m.def("note_signal", [](int signal) {
    Error error;
    const int fd = note_signal(signal, error);
    raise_if(error);
    return fd;
  });
  m.def("n_waiting", [] { return n_waiting.load(); });
  m.def("wakeups", [] {
    const Mesh::Wakeups& counts = Mesh::wakeups();
    nb::dict fields;
    fields["callers_rung"] = counts.callers_rung.load();
    fields["callers_timed"] = counts.callers_timed.load();
    fields["thread_rung"] = counts.thread_rung.load();
    fields["late"] = counts.late.load();
    return fields;
  });
  pthread_atfork(nullptr, nullptr, [] { n_waiting = 0; });  // no other thread is in the child
}
